// A message on the page: who, folded reasoning and calls of tools, the text, a note, and what can be done with it.

import { copyButton, icon, iconButton, make, textButton } from "./elements.js";
import { Markdown } from "./markdown.js";

const NOTES = {
  length: "The answer reached its token limit.",
  stopped: "Stopped.",
  lost: "The connection was lost. What came until then is kept.",
  open: "Not complete: the page was closed, or another tab still receives it.",
};

export class MessageView {
  // act: what the buttons do, { edit, regenerate, resume, choose }, each given the message first
  constructor(message, act) {
    this.message = message;
    this.act = act;
    const isOwn = message.role === "user";
    this.element = make("article", `message ${message.role}`);
    this.element.setAttribute("aria-label", isOwn ? "You" : message.role === "tool" ? "Tool" : "Model");
    this.reasoning = make("details", "reasoning");
    this.thought = new Markdown();
    this.reasoning.append(make("summary", "", "Reasoning"), this.thought.element);
    this.calls = make("div", "calls");
    this.text = isOwn ? null : new Markdown();
    this.body = isOwn ? make("div", "text plain") : this.text.element;
    this.note = make("p", "note");
    this.bar = make("div", "actions");
    this.element.append(this.reasoning, this.body, this.calls, this.note, this.bar);
  }

  // Shows the message as it is. isGrowing: whether its answer is under way; progress: of its prompt, "" if unknown
  show({ isGrowing, isLocked, isLast, siblings, progress = "" }) {
    const { content, reasoning = "", calls = [] } = this.message;
    this.element.setAttribute("aria-busy", `${isGrowing}`);
    if (this.text) this.text.show(content, !isGrowing);
    else this.body.textContent = content;
    this.body.hidden = content === "";
    this.reasoning.hidden = reasoning === "";
    this.thought.show(reasoning, !isGrowing);
    this.reasoning.firstChild.textContent = isGrowing && content === "" ? "Thinking …" : "Reasoning";
    this.showCalls(calls);
    this.note.textContent = isGrowing ? progress : noteOf(this.message);
    const isEmpty = content === "" && reasoning === "" && calls.length === 0;
    this.element.classList.toggle("waiting", isGrowing && isEmpty);
    const state = JSON.stringify([isGrowing, isLocked, isLast, siblings.map((each) => each.id), this.message.ending]);
    if (state !== this.state) this.showActions(isGrowing, isLocked, isLast, siblings);
    this.state = state;
  }

  showCalls(calls) {
    while (this.calls.childElementCount > calls.length) this.calls.lastChild.remove();
    calls.forEach((call, index) => {
      if (!this.calls.children[index]) {
        const shown = make("details", "call", make("summary"), make("pre", "", make("code")));
        this.calls.append(shown);
      }
      const shown = this.calls.children[index];
      shown.firstChild.textContent = `Tool call: ${call.name}`;
      shown.querySelector("code").textContent = indented(call.arguments);
    });
  }

  showActions(isGrowing, isLocked, isLast, siblings) {
    const { message, act } = this;
    const buttons = [];
    if (siblings.length > 1) buttons.push(this.pager(siblings, isLocked));
    if (!isGrowing) buttons.push(copyButton("Copy message", () => message.content));
    if (!isLocked && message.role === "user") {
      buttons.push(iconButton("edit", "Edit message", () => this.edit(message.content)));
    }
    if (!isLocked && message.role === "assistant") {
      buttons.push(iconButton("again", "Regenerate answer", () => act.regenerate(message)));
      if (isLast && isCut(message)) {
        const resume = textButton("Continue", () => act.resume(message), "resume");
        resume.prepend(icon("continue"));
        buttons.push(resume);
      }
    }
    this.bar.replaceChildren(...buttons);
  }

  // Which of several versions of the message this is, with buttons to the others.
  pager(siblings, isLocked) {
    const at = siblings.findIndex((each) => each.id === this.message.id);
    const go = (name, label, to) => {
      const button = iconButton(name, label, () => this.act.choose(siblings[to]));
      button.disabled = isLocked || !siblings[to];
      return button;
    };
    const place = make("span", "", `${at + 1} of ${siblings.length}`);
    return make("span", "pager", go("left", "Previous version", at - 1), place, go("right", "Next version", at + 1));
  }

  // Shows a field with a text in the place of the message's own.
  edit(text) {
    const field = make("textarea");
    field.value = text;
    field.setAttribute("aria-label", "Edited message");
    const close = () => {
      editor.remove();
      this.body.hidden = this.bar.hidden = false;
    };
    const send = () => {
      if (!field.value.trim()) return;
      close();
      this.act.edit(this.message, field.value.trim());
    };
    const cancel = () => {
      close();
      this.bar.querySelector("button")?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const row = make("div", "row", textButton("Cancel", cancel), textButton("Send", send, "primary"));
    const editor = make("div", "editor", field, row);
    this.body.hidden = this.bar.hidden = true;
    this.element.insertBefore(editor, this.note);
    field.focus();
  }
}

// Whether an answer can go on where it ended.
function isCut(message) {
  return ["length", "stopped", "lost", "failed", "open"].includes(message.ending) && message.content !== "";
}

function noteOf({ role, ending, problem, timings }) {
  if (role !== "assistant") return "";
  const why = ending === "failed" ? `The answer was cut off by an error: ${problem}` : (NOTES[ending] ?? "");
  return [why, timings ? statistics(timings) : ""].filter(Boolean).join(" ");
}

function statistics(timings) {
  const { predicted_n: tokens, predicted_per_second: rate, prompt_n: computed, cache_n: cached } = timings;
  const prompt = computed + cached;
  const parts = [`${count(tokens)} ${tokens === 1 ? "token" : "tokens"}`];
  if (rate > 0) parts.push(`${rate.toFixed(1)} tokens/s`);
  parts.push(`prompt ${count(prompt)}` + (cached ? `, ${count(cached)} cached` : ""));
  if (timings.draft_n) parts.push(`${count(timings.draft_n_accepted)} of ${count(timings.draft_n)} drafted accepted`);
  return parts.join(" · ");
}

export const count = (value) => value.toLocaleString("en-US");

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // it grows still, or was cut off
  }
}
