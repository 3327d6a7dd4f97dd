// A conversation as a tree of messages: an edit or another answer is a sibling of the message before it, and what is
// shown and sent is the path from the first message to `leaf`. A record of plain values, as it is kept and exported:
//   { id, title, created, updated, revision, leaf, messages: [{ id, parent, role, content, … }] }
// `parent` and `leaf` are ids of messages or null. An answer also has
//   reasoning, calls: [{ name, arguments }], ending, problem, timings
// where `ending` says why it ended: "stop", "length", "stopped", "lost", "failed", or "open" while it grows.

const MAX_TITLE = 80;
const ROLES = ["user", "assistant", "tool"];
const ENDINGS = ["stop", "length", "stopped", "lost", "failed"];

export function newConversation() {
  const now = Date.now();
  return { id: crypto.getRandomValues(new Uint32Array(4)).join("-"), title: "", created: now, updated: now, revision: 0, leaf: null, messages: [] };
}

// Adds a message below `parent`, and makes it the last one that is shown.
export function addMessage(conversation, parent, fields) {
  const id = 1 + Math.max(0, ...conversation.messages.map((each) => each.id));
  const message = { id, parent, ...fields };
  conversation.messages.push(message);
  conversation.leaf = id;
  if (!conversation.title && fields.role === "user") conversation.title = titleOf(fields.content);
  return message;
}

// The messages that are shown, first one first.
export function pathOf(conversation) {
  const byId = new Map(conversation.messages.map((each) => [each.id, each]));
  const path = [];
  for (let at = byId.get(conversation.leaf); at; at = byId.get(at.parent)) path.push(at);
  return path.reverse();
}

export function siblingsOf(conversation, message) {
  return conversation.messages.filter((each) => each.parent === message.parent);
}

// Shows the newest path through a message.
export function choose(conversation, message) {
  let leaf = message;
  for (;;) {
    const below = conversation.messages.filter((each) => each.parent === leaf.id);
    if (below.length === 0) break;
    leaf = below.at(-1);
  }
  conversation.leaf = leaf.id;
}

// Removes a message and all below it. The message above it is the last one that is shown.
export function removeMessage(conversation, message) {
  const gone = new Set([message.id]);
  for (const each of conversation.messages) if (gone.has(each.parent)) gone.add(each.id);
  conversation.messages = conversation.messages.filter((each) => !gone.has(each.id));
  conversation.leaf = message.parent;
  const last = conversation.messages.findLast((each) => each.parent === message.parent);
  if (last) choose(conversation, last);
}

export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line;
}

// A conversation of an imported file, with those fields alone that this page knows. Throws Error for any other value.
export function checked(given) {
  if (typeof given !== "object" || given === null || !Array.isArray(given.messages)) throw new Error("it has no messages");
  const made = newConversation();
  const known = new Set();
  for (const each of given.messages) {
    const message = checkedMessage(each);
    if (message.parent !== null && !known.has(message.parent)) throw new Error("a message comes before its parent");
    if (known.has(message.id)) throw new Error("two messages have the same id");
    known.add(message.id);
    made.messages.push(message);
  }
  if (made.messages.length === 0) throw new Error("it has no messages");
  made.title = titleOf(text(given.title ?? "") || made.messages[0].content);
  made.leaf = known.has(given.leaf) ? given.leaf : made.messages.at(-1).id;
  for (const name of ["created", "updated"]) if (Number.isFinite(given[name])) made[name] = given[name];
  return made;
}

function checkedMessage(given) {
  if (!ROLES.includes(given?.role)) throw new Error(`the role of a message is one of ${ROLES.join(", ")}`);
  if (!Number.isSafeInteger(given.id) || given.id < 1) throw new Error("the id of a message is a number from 1 on");
  const message = { id: given.id, parent: given.parent ?? null, role: given.role, content: text(given.content) };
  if (given.role !== "assistant") return message;
  message.ending = ENDINGS.includes(given.ending) ? given.ending : "stop";
  message.reasoning = text(given.reasoning ?? "");
  if (given.problem !== undefined) message.problem = text(given.problem);
  message.calls = (given.calls ?? []).map((call) => ({ name: text(call.name), arguments: text(call.arguments) }));
  const numbers = Object.entries(given.timings ?? {}).filter(([, value]) => Number.isFinite(value));
  if (numbers.length) message.timings = Object.fromEntries(numbers);
  return message;
}

function text(value) {
  if (typeof value !== "string") throw new Error("a text is no string");
  return value;
}
