// The list of kept conversations: open, rename, delete, search, export and import.

import { checked } from "./conversation.js";
import { element, iconButton, make } from "./elements.js";

const FORMAT = "coldstream-conversations";
const MAX_FILE_BYTES = 100_000_000;
const MAX_TITLE = 200;

export class List {
  // chat: a Chat; store: a Store. on: { opened, problem }: called after one was chosen, and with what went wrong
  constructor(chat, store, on) {
    this.chat = chat;
    this.store = store;
    this.on = on;
    this.items = element("conversations");
    this.numRefreshes = 0;
    this.shown = ""; // what the list shows, as JSON
    this.search = element("search");
    this.search.addEventListener("input", () => this.refresh());
    element("export").addEventListener("click", async () => {
      await chat.saving;
      download("conversations", await store.all());
    });
    const file = element("import-file");
    element("import").addEventListener("click", () => file.click());
    file.addEventListener("change", async () => {
      await this.read(file.files[0]);
      file.value = "";
    });
    if (!store.isLasting) element("list-note").textContent = "This browser keeps nothing: conversations end with this tab.";
  }

  // Shows the list as it is kept now. A title that is being written stays, and so does the focus.
  async refresh() {
    this.numRefreshes += 1;
    const number = this.numRefreshes;
    const words = this.search.value.trim();
    const shown = words ? await this.store.all(words) : await this.store.list();
    if (number !== this.numRefreshes || this.items.querySelector("input")) return;
    const { id: current } = this.chat.conversation;
    const state = JSON.stringify([words, current, shown.map(({ id, title }) => [id, title, this.chat.isAnswering(id)])]);
    if (state === this.shown) return;
    this.shown = state;
    const focused = document.activeElement.closest("#conversations li");
    const place = focused ? [...focused.querySelectorAll("button")].indexOf(document.activeElement) : -1;
    this.items.replaceChildren(...shown.map((each) => this.item(each)));
    if (focused) this.focus(focused.dataset.id, place);
    if (shown.length === 0) {
      this.items.append(make("li", "help none", words ? "No conversation has these words." : "No conversations yet."));
    }
    element("export").disabled = shown.length === 0;
  }

  focus(id, place) {
    this.items.querySelector(`[data-id="${id}"]`)?.querySelectorAll("button")[place]?.focus();
  }

  item({ id, title }) {
    const name = title || "Untitled";
    const open = make("button", "open", name);
    open.type = "button";
    open.title = name;
    const isCurrent = id === this.chat.conversation.id;
    if (isCurrent) open.setAttribute("aria-current", "true");
    open.addEventListener("click", async () => {
      await this.chat.open(id);
      this.on.opened();
    });
    const item = make("li", isCurrent ? "current" : "", open);
    item.dataset.id = id;
    if (this.chat.isAnswering(id)) item.classList.add("answering");
    const tools = make("span", "tools");
    tools.append(
      iconButton("edit", `Rename ${name}`, () => this.rename(item, id, name)),
      iconButton("export", `Export ${name}`, async () => {
        await this.chat.saving;
        download(name, [await this.store.read(id)]);
      }),
      iconButton("delete", `Delete ${name}`, () => this.remove(id, name)),
    );
    item.append(tools);
    return item;
  }

  rename(item, id, name) {
    const field = make("input");
    field.value = name;
    field.maxLength = MAX_TITLE;
    field.setAttribute("aria-label", "Title");
    let isOver = false;
    const end = async (isKept, isByKey) => {
      if (isOver) return;
      isOver = true;
      const title = field.value.trim();
      field.remove();
      if (isKept && title && title !== name) await this.chat.rename(id, title);
      this.shown = "";
      await this.refresh();
      if (isByKey) this.focus(id, 0);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      end(event.key === "Enter", true);
    });
    field.addEventListener("blur", () => end(true, false));
    item.replaceChildren(field);
    field.select();
  }

  remove(id, name) {
    const dialog = element("confirm");
    element("confirm-text").textContent = `Delete “${name}”? It cannot be brought back.`;
    dialog.returnValue = "no";
    // A listener of its own would also be called by the end of the time before, which the browser tells later.
    dialog.onclose = () => {
      if (!dialog.open && dialog.returnValue === "yes") this.chat.remove(id);
    };
    dialog.showModal();
  }

  // Adds the conversations of a file. None is added if one of them cannot be read.
  async read(file) {
    try {
      if (file.size > MAX_FILE_BYTES) throw new Error(`it is larger than ${MAX_FILE_BYTES / 1e6} MB`);
      const given = JSON.parse(await file.text());
      if (given?.format !== FORMAT || !Array.isArray(given.conversations)) throw new Error(`its format is not ${FORMAT}`);
      const made = given.conversations.map(checked);
      for (const each of made) await this.store.write(each);
      await this.refresh();
      if (made.length) await this.chat.open(made[0].id);
      this.on.opened();
    } catch (error) {
      this.on.problem(new ImportError(`${file.name}: ${error.message}.`));
    }
  }
}

class ImportError extends Error {
  isImport = true;
}

function download(name, conversations) {
  const text = JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = `${name.replace(/[^\p{L}\p{N}_ -]+/gu, "").trim().slice(0, 60) || "conversation"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
