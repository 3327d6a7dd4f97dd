// Where conversations are kept: a database of this browser, which its tabs share. Without one, the memory of the tab.
//
// Two tabs never overwrite each other: a conversation carries the number of times that it was written, and one that
// another tab has written meanwhile is kept as a copy under a new id.

import { newConversation } from "./conversation.js";

const NAME = "coldstream";
const LIMITS = { conversations: 500, chars: 50_000_000 }; // `chars`: of all together, as JSON

export async function openStore(limits = LIMITS) {
  try {
    return new Store(await database(), limits);
  } catch {
    return new Store(null, limits);
  }
}

export class Store {
  // base: a database, or null
  constructor(base, limits) {
    this.base = base;
    this.limits = limits;
    this.memory = new Map();
    this.channel = new BroadcastChannel(NAME);
  }

  // Whether conversations are there when the page is opened again.
  get isLasting() {
    return this.base !== null;
  }

  // changed: called with the id of a conversation that another tab has written or deleted
  onChange(changed) {
    this.channel.addEventListener("message", (event) => changed(event.data));
  }

  // { id, title, updated, size, revision } of each conversation, the newest first.
  async list() {
    const heads = this.base
      ? await result(this.base.transaction("heads").objectStore("heads").getAll())
      : [...this.memory.values()].map(headOf);
    return heads.sort((a, b) => b.updated - a.updated);
  }

  // The conversation, or undefined if there is none of this id.
  async read(id) {
    if (!this.base) return structuredClone(this.memory.get(id));
    return result(this.base.transaction("conversations").objectStore("conversations").get(id));
  }

  // All conversations, the newest first. Those of a search have its words in their title or messages.
  async all(search = "") {
    const every = this.base
      ? await result(this.base.transaction("conversations").objectStore("conversations").getAll())
      : [...this.memory.values()];
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const has = (each, word) =>
      each.title.toLowerCase().includes(word) || each.messages.some((one) => one.content.toLowerCase().includes(word));
    return every.filter((each) => words.every((word) => has(each, word))).sort((a, b) => b.updated - a.updated);
  }

  // Writes a conversation and sets its `revision`; its `id` and `title` too if another tab has written it since it
  // was read. The oldest ones go if there are more than may be kept. Throws Error if the browser has no room; the
  // conversation is as before then.
  async write(conversation) {
    if (!this.base) {
      conversation.revision += 1;
      this.memory.set(conversation.id, structuredClone(conversation));
      return;
    }
    const transaction = this.base.transaction(["heads", "conversations"], "readwrite");
    const heads = transaction.objectStore("heads");
    const bodies = transaction.objectStore("conversations");
    const ended = whole(transaction);
    const kept = await result(heads.get(conversation.id));
    const changes = { revision: conversation.revision + 1 };
    if (kept && kept.revision !== conversation.revision) {
      Object.assign(changes, { id: newConversation().id, title: `${conversation.title} (copy)` });
    }
    const written = { ...conversation, ...changes };
    const head = headOf(written);
    bodies.put(written);
    heads.put(head);
    for (const id of surplus(await result(heads.getAll()), head, this.limits)) {
      heads.delete(id);
      bodies.delete(id);
    }
    await ended;
    Object.assign(conversation, changes);
    this.channel.postMessage(conversation.id);
  }

  async remove(id) {
    this.memory.delete(id);
    if (!this.base) return;
    const transaction = this.base.transaction(["heads", "conversations"], "readwrite");
    transaction.objectStore("heads").delete(id);
    transaction.objectStore("conversations").delete(id);
    await whole(transaction);
    this.channel.postMessage(id);
  }
}

function headOf(conversation) {
  const { id, title, updated, revision } = conversation;
  return { id, title, updated, revision, size: JSON.stringify(conversation).length };
}

// The ids of the oldest conversations beyond the limits, never the one just written.
function surplus(heads, written, limits) {
  const others = heads.filter((each) => each.id !== written.id).sort((a, b) => b.updated - a.updated);
  let size = written.size;
  const gone = others.filter((each, index) => {
    size += each.size;
    return index + 1 >= limits.conversations || size > limits.chars;
  });
  return gone.map((each) => each.id);
}

function database() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("heads", { keyPath: "id" });
    request.result.createObjectStore("conversations", { keyPath: "id" });
  };
  return result(request);
}

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function whole(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error ?? new Error("the browser did not write"));
  });
}
