// A conversation: what was said, the answer under way, and how both are shown.

import { events } from "./api.js";
import { fields, systemMessages } from "./settings.js";

const FENCE = /^```[^\n]*\n?/m;

export class Chat {
  // list: the element that shows messages; onChange: told whether an answer is under way
  constructor(list, onChange) {
    this.list = list;
    this.onChange = onChange;
    this.said = [];
    this.running = null;
  }

  // Messages that the next question is sent with.
  get length() {
    return this.said.length;
  }

  get isRunning() {
    return this.running !== null;
  }

  // Says something and shows the answer as it comes. Throws what the server complains of; if nothing was
  // answered, the conversation is as before.
  async say(text) {
    const chosen = fields();
    const asked = { role: "user", content: text };
    const shownAsked = new Shown("user", "You");
    shownAsked.show(text, "");
    const answer = new Answer(new Shown("assistant", "Model"));
    this.list.append(shownAsked.element, answer.shown.element);
    this.running = new AbortController();
    this.onChange(true);
    try {
      const messages = [...systemMessages(), ...this.said, asked];
      const body = { ...chosen, messages, stream: true };
      for await (const chunk of events("v1/chat/completions", body, this.running.signal)) {
        const atEnd = isAtEnd(this.list);
        answer.take(chunk);
        if (atEnd) this.list.scrollTop = this.list.scrollHeight;
      }
      answer.finish();
    } catch (error) {
      const isStop = error.name === "AbortError";
      answer.finish(isStop ? "Stopped." : "Cut off by an error.");
      if (!answer.isEmpty) {
        this.said.push(asked, answer.message);
      } else if (!isStop) {
        shownAsked.element.remove();
        answer.shown.element.remove();
      }
      if (!isStop) throw error;
      return;
    } finally {
      this.running = null;
      this.onChange(false);
    }
    this.said.push(asked, answer.message);
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.said = [];
    this.list.replaceChildren();
  }
}

class Answer {
  constructor(shown) {
    this.shown = shown;
    this.content = "";
    this.reasoning = "";
    this.ending = "";
    this.shown.element.setAttribute("aria-busy", "true");
    this.shown.note.textContent = "Answering …";
  }

  get isEmpty() {
    return this.content === "" && this.reasoning === "";
  }

  get message() {
    return { role: "assistant", content: this.content };
  }

  take(chunk) {
    for (const choice of chunk.choices ?? []) {
      this.content += choice.delta?.content ?? "";
      this.reasoning += choice.delta?.reasoning_content ?? "";
      if (choice.finish_reason === "length") this.ending = "It reached the most tokens. ";
    }
    if (chunk.timings) this.ending += speed(chunk.timings);
    this.shown.show(this.content, this.reasoning);
  }

  // Readers of the screen are told of the answer once it is whole.
  finish(why = "") {
    this.shown.element.setAttribute("aria-busy", "false");
    this.shown.note.textContent = why || this.ending;
  }
}

// A message on the page: who, folded reasoning, text with blocks of code, and a note.
class Shown {
  constructor(role, who) {
    this.element = make("article", `message ${role}`);
    this.reasoning = document.createElement("details");
    this.reasoning.hidden = true;
    this.reasoning.append(make("summary", "", "Reasoning"), make("div", "text"));
    this.text = make("div", "text");
    this.note = make("p", "note");
    this.element.append(make("p", "who", who), this.reasoning, this.text, this.note);
  }

  show(text, reasoning) {
    this.reasoning.hidden = reasoning === "";
    this.reasoning.lastElementChild.textContent = reasoning;
    const parts = text.split(FENCE).map((part, index) => (index % 2 ? make("pre", "", part) : part));
    this.text.replaceChildren(...parts.filter((part) => part !== ""));
  }
}

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

function speed(timings) {
  const rate = timings.predicted_per_second;
  return `${timings.predicted_n} tokens` + (rate > 0 ? `, ${rate.toFixed(1)} a second.` : ".");
}

function isAtEnd(list) {
  return list.scrollHeight - list.scrollTop - list.clientHeight < 40;
}
