// The conversation that is shown, and the answers under way, of which each conversation can have one.

import { events } from "./api.js";
import { addMessage, choose, newConversation, pathOf, removeMessage, siblingsOf } from "./conversation.js";
import { MessageView, count } from "./message.js";
import { fields, systemMessages } from "./settings.js";

const SAVE_EVERY_MS = 2000; // while an answer grows
const IDLE_SHARE = 3; // of the time that showing a growing answer took, until it is shown again

export class Chat {
  // list: the element for the messages; store: a Store; follower: a Follower.
  // on: { change, problem, contextUsed, saving }: called after each change of what is shown or runs, with an error and
  // how to try again, with the tokens of the conversation, and with whether something is still to be kept
  constructor(list, store, follower, on) {
    this.list = list;
    this.store = store;
    this.follower = follower;
    this.on = on;
    this.runs = new Map(); // by conversation
    this.forgotten = new Set(); // conversations that are not kept any more
    this.saving = Promise.resolve(); // fulfilled when all is kept
    this.conversation = newConversation();
    this.views = new Map();
  }

  get run() {
    return this.runs.get(this.conversation) ?? null;
  }

  get isRunning() {
    return this.run !== null;
  }

  get isEmpty() {
    return this.conversation.messages.length === 0;
  }

  isAnswering(id) {
    return [...this.runs.keys()].some((each) => each.id === id);
  }

  // A new conversation, which is kept once something is said.
  begin() {
    this.present(newConversation());
  }

  // Shows a kept conversation; nothing changes if it is there no more.
  async open(id) {
    const running = [...this.runs.keys()].find((each) => each.id === id);
    const conversation = running ?? (await this.store.read(id));
    if (conversation) this.present(conversation);
  }

  // What another tab has written is shown, unless this tab answers in it.
  async reload(id) {
    if (id !== this.conversation.id || this.isRunning || this.list.querySelector(".editor")) return;
    const conversation = await this.store.read(id);
    if (id !== this.conversation.id || this.isRunning) return;
    if (!conversation) this.begin();
    else if (conversation.revision !== this.conversation.revision) this.present(conversation);
  }

  present(conversation) {
    this.conversation = conversation;
    this.views = new Map();
    this.list.replaceChildren();
    this.show();
    this.follower.toEnd();
  }

  // Whether the answer began: if not, the conversation is as before, and `on.problem` has been told why, and `retry`.
  async send(text, retry) {
    const { conversation } = this;
    const before = conversation.leaf;
    const asked = addMessage(conversation, before, { role: "user", content: text });
    const answered = await this.answer(conversation, asked, retry);
    if (!answered) {
      removeMessage(conversation, asked);
      conversation.leaf = before;
      if (conversation.messages.length === 0) conversation.title = "";
      this.show();
    }
    return answered;
  }

  // Says another thing in the place of an own message; both stay.
  async edit(message, text) {
    const { conversation } = this;
    const before = conversation.leaf;
    const asked = addMessage(conversation, message.parent, { role: "user", content: text });
    const answered = await this.answer(conversation, asked, () => this.edit(message, text));
    if (answered) return;
    removeMessage(conversation, asked);
    conversation.leaf = before;
    this.show();
    this.views.get(message.id)?.edit(text);
  }

  // Another answer in the place of one; both stay.
  async regenerate(message) {
    const { conversation } = this;
    const before = conversation.leaf;
    const asked = conversation.messages.find((each) => each.id === message.parent) ?? null;
    if (!asked) return;
    if (!(await this.answer(conversation, asked, () => this.regenerate(message)))) {
      conversation.leaf = before;
      this.show();
    }
  }

  // Goes on with an answer where it ended.
  async resume(message) {
    await this.generate(this.conversation, message, true, () => this.resume(message));
  }

  stop() {
    this.run?.abort.abort();
  }

  // Deletes a conversation; its answer under way ends.
  async remove(id) {
    for (const conversation of [this.conversation, ...this.runs.keys()]) {
      if (conversation.id === id) this.forgotten.add(conversation);
    }
    for (const run of this.runs.values()) if (run.conversation.id === id) run.abort.abort();
    await this.store.remove(id);
    if (this.conversation.id === id) this.begin();
    this.on.change();
  }

  async rename(id, title) {
    const open = [this.conversation, ...this.runs.keys()].find((each) => each.id === id);
    const conversation = open ?? (await this.store.read(id));
    if (!conversation) return;
    conversation.title = title;
    await this.save(conversation);
  }

  // A new answer to a message. Whether it began.
  async answer(conversation, asked, retry) {
    const fresh = { role: "assistant", content: "", reasoning: "", calls: [], ending: "open" };
    const message = addMessage(conversation, asked.id, fresh);
    const hasBegun = await this.generate(conversation, message, false, retry);
    if (!hasBegun) removeMessage(conversation, message);
    return hasBegun;
  }

  // Lets a message grow by what the server sends. Whether anything came, or the reader stopped it.
  async generate(conversation, message, isResumed, retry) {
    const run = new Run(conversation, message);
    const sizeBefore = sizeOf(message);
    const endingBefore = message.ending;
    this.runs.set(conversation, run);
    message.ending = "open";
    this.show();
    this.follower.toEnd();
    let failure = null;
    try {
      const body = { ...fields(), ...prompt(conversation, message, isResumed), stream: true, return_progress: true };
      for await (const chunk of events("v1/chat/completions", body, run.abort.signal)) {
        take(run, chunk);
        this.grow(run);
      }
    } catch (error) {
      failure = error;
    }
    cancelAnimationFrame(run.frame);
    clearTimeout(run.timer);
    this.runs.delete(conversation);
    const hasGrown = sizeOf(message) > sizeBefore;
    const isStopped = failure?.name === "AbortError";
    if (failure && !hasGrown && !isStopped) {
      message.ending = endingBefore;
      this.on.problem(failure, retry);
      this.show();
      return false;
    }
    finish(message, failure);
    this.show();
    await this.save(conversation);
    return true;
  }

  // Shows more of an answer, at most once a frame, and rarer if showing takes long. Keeps it every few seconds.
  grow(run) {
    if (run.savedAt + SAVE_EVERY_MS < performance.now()) {
      run.savedAt = performance.now();
      this.save(run.conversation);
    }
    if (run.frame || run.timer) return;
    run.timer = setTimeout(() => {
      run.timer = 0;
      run.frame = requestAnimationFrame(() => {
        run.frame = 0;
        if (run.conversation !== this.conversation) return;
        const begin = performance.now();
        this.showMessage(run.message, pathOf(run.conversation));
        run.pause = IDLE_SHARE * (performance.now() - begin);
      });
    }, run.pause);
  }

  // Keeps a conversation, after all that was to be kept before, unless it is deleted meanwhile.
  async save(conversation) {
    if (this.forgotten.has(conversation)) return;
    conversation.updated = Date.now();
    const write = () => (this.forgotten.has(conversation) ? null : this.store.write(conversation));
    const saving = this.saving.then(write).catch((error) => {
      this.on.problem(new StorageError(error.message), null);
    });
    this.saving = saving;
    this.on.saving(true);
    await saving;
    if (this.saving === saving) this.on.saving(false);
    this.on.change();
  }

  show() {
    const path = pathOf(this.conversation);
    const ids = new Set(path.map((each) => each.id));
    for (const [id, view] of this.views) {
      if (ids.has(id) && view.message === path.find((each) => each.id === id)) continue;
      view.element.remove();
      this.views.delete(id);
    }
    for (const message of path) this.showMessage(message, path);
    const last = path.findLast((each) => each.timings);
    this.on.contextUsed(last ? last.timings.prompt_n + last.timings.cache_n + last.timings.predicted_n : 0);
    this.on.change();
  }

  showMessage(message, path) {
    let view = this.views.get(message.id);
    if (!view) {
      view = new MessageView(message, {
        edit: (each, text) => this.edit(each, text),
        regenerate: (each) => this.regenerate(each),
        resume: (each) => this.resume(each),
        choose: (each) => this.choose(each),
      });
      this.views.set(message.id, view);
      this.list.append(view.element);
    }
    const { run } = this;
    view.show({
      isGrowing: run?.message === message,
      isLocked: run !== null,
      isLast: path.at(-1) === message,
      siblings: siblingsOf(this.conversation, message),
      progress: run?.message === message ? run.progress : "",
    });
  }

  async choose(message) {
    choose(this.conversation, message);
    this.show();
    this.views.get(message.id)?.element.querySelector(".pager button:enabled")?.focus({ preventScroll: true });
    await this.save(this.conversation);
  }
}

export class StorageError extends Error {
  isStorage = true;
}

// An answer under way.
class Run {
  constructor(conversation, message) {
    this.conversation = conversation;
    this.message = message;
    this.abort = new AbortController();
    this.progress = "Waiting for the first token …";
    this.savedAt = -Infinity;
    this.pause = 0;
  }
}

// The fields of a request for `message`: the messages before it, and what has come of it if it is resumed.
function prompt(conversation, message, isResumed) {
  const path = pathOf({ ...conversation, leaf: isResumed ? message.id : message.parent });
  const messages = [...systemMessages(), ...path.filter((each) => each.role !== "assistant" || sizeOf(each) > 0).map(sent)];
  return isResumed ? { messages, continue_final_message: true, add_generation_prompt: false } : { messages };
}

function sent({ role, content, reasoning, calls }) {
  const message = { role, content };
  if (reasoning) message.reasoning_content = reasoning;
  if (calls?.length) message.tool_calls = calls.map((call) => ({ type: "function", function: call }));
  return message;
}

function take(run, chunk) {
  const { message } = run;
  for (const { delta = {}, finish_reason: reason } of chunk.choices ?? []) {
    message.content += delta.content ?? "";
    message.reasoning += delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) {
      message.calls[part.index] ??= { name: "", arguments: "" };
      message.calls[part.index].name += part.function?.name ?? "";
      message.calls[part.index].arguments += part.function?.arguments ?? "";
    }
    if (reason) message.ending = reason === "length" ? "length" : "stop";
  }
  if (chunk.timings) message.timings = chunk.timings;
  const { total, processed } = chunk.prompt_progress ?? {};
  run.progress = total && processed < total ? `Reading the prompt: ${count(processed)} of ${count(total)} tokens` : "";
}

function finish(message, failure) {
  if (failure?.name === "AbortError") message.ending = "stopped";
  else if (failure?.status === 0) message.ending = "lost";
  else if (failure) {
    message.ending = "failed";
    message.problem = failure.message;
  } else if (message.ending === "open") message.ending = "stop";
}

const sizeOf = ({ content, reasoning, calls }) => content.length + reasoning.length + calls.length;
