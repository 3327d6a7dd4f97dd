// Connects the parts of the page.

import { getJson, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { element, iconButton, make, textButton } from "./elements.js";
import { Engine } from "./engine.js";
import { Follower } from "./follow.js";
import { HeatMap } from "./heat_map.js";
import { keep, kept } from "./kept.js";
import { List } from "./list.js";
import { count } from "./message.js";
import { arrangePanels, closeOverlays } from "./panels.js";
import { explained } from "./problems.js";
import { restoreSettings, showDefaults } from "./settings.js";
import { openStore } from "./store.js";

const DRAFT = "coldstream-draft";
const OPEN = "coldstream-open"; // the conversation of this tab
const prompt = element("prompt");
const problem = element("problem");
const keyForm = element("key-form");
const isTouched = matchMedia("(pointer: coarse)");

let contextSize = 0;
let tokensUsed = 0;
let retryWhenReady = null;

const store = await openStore();
const follower = new Follower(element("scroller"), element("messages"), element("to-end"));
const chat = new Chat(element("messages"), store, follower, {
  change: () => changed(),
  problem: (error, retry) => showProblem(error, retry),
  contextUsed: (tokens) => showContext(tokens),
  saving: (isPending) => element("conversations").setAttribute("aria-busy", `${isPending}`),
});
const list = new List(chat, store, {
  opened: () => {
    hideProblem();
    closeOverlays();
    focusPrompt();
  },
  problem: (error) => showProblem(error, null),
});
const map = new HeatMap(element("experts"), element("experts-summary"), element("experts-cell"));
const engine = new Engine(map, askForKey, seen);

function changed() {
  element("send").disabled = chat.isRunning;
  element("stop").hidden = !chat.isRunning;
  element("welcome").hidden = !chat.isEmpty;
  keep("sessionStorage", OPEN, chat.conversation.id);
  document.title = [chat.conversation.title, "coldstream"].filter(Boolean).join(" · ");
  list.refresh();
}

async function send() {
  const text = prompt.value.trim();
  if (!text || chat.isRunning) return;
  hideProblem();
  setDraft("");
  if (!(await chat.send(text, send)) && !prompt.value) setDraft(text);
}

function setDraft(text) {
  prompt.value = text;
  keep("sessionStorage", DRAFT, text);
}

// On a touch screen the focus would open a keyboard over what is read.
function focusPrompt() {
  if (!isTouched.matches) prompt.focus({ preventScroll: true });
}

function begin() {
  chat.begin();
  hideProblem();
  closeOverlays();
  focusPrompt();
}

function showProblem(error, retry) {
  const { title, text, buttons, detail, whenReady } = explained(error);
  const again = () => {
    hideProblem();
    retry();
  };
  const made = {
    retry: () => retry && textButton("Try again", again),
    new: () => textButton("New chat", begin),
    settings: () => textButton("Settings", () => element("settings").showModal()),
  };
  const row = make("div", "row", ...buttons.map((name) => made[name]()).filter(Boolean));
  const close = iconButton("close", "Close", hideProblem);
  problem.replaceChildren(close, make("strong", "", title), make("p", "", text), make("p", "help", detail), row);
  problem.hidden = false;
  retryWhenReady = whenReady && retry ? again : null;
  if (error.status === 401) askForKey();
}

function hideProblem() {
  problem.hidden = true;
  problem.replaceChildren();
  retryWhenReady = null;
}

function askForKey() {
  if (!keyForm.hidden) return;
  keyForm.hidden = false;
  element("key").focus();
}

// The engine as it is now. Sends again what waited for it.
function seen(live, isNew) {
  if (isNew) learn();
  if (live.state === "ready" && retryWhenReady) retryWhenReady();
}

// What the model does by default, and how long its context is.
async function learn() {
  try {
    const props = await getJson("props");
    showDefaults(props);
    contextSize = props.default_generation_settings.n_ctx;
    element("welcome-model").textContent = `${props.model_alias} · context of ${count(contextSize)} tokens`;
    showContext(tokensUsed);
  } catch {
    // The engine view says what is wrong.
  }
}

function showContext(tokens) {
  tokensUsed = tokens;
  element("context").textContent = tokens && contextSize ? `${count(tokens)} of ${count(contextSize)} tokens of context` : "";
}

element("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  // A keyboard on a screen has no Shift+Enter: there Enter begins a new line and the button sends.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouched.matches) return;
  event.preventDefault();
  send();
});
prompt.addEventListener("input", () => keep("sessionStorage", DRAFT, prompt.value));
element("stop").addEventListener("click", () => {
  chat.stop();
  focusPrompt();
});
element("new").addEventListener("click", begin);
element("open-settings").addEventListener("click", () => element("settings").showModal());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]") && !closeOverlays()) chat.stop();
  if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    begin();
  }
});
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(element("key").value);
  element("key").value = "";
  keyForm.hidden = true;
  hideProblem();
  focusPrompt();
  engine.start();
});
// Where the browser does not shrink the page for a keyboard on the screen, the page does it by itself.
visualViewport?.addEventListener("resize", () => {
  if (visualViewport.scale !== 1) return;
  document.documentElement.style.setProperty("--height", `${visualViewport.height}px`);
});

store.onChange((id) => {
  chat.reload(id);
  list.refresh();
});
restoreSettings();
arrangePanels();
prompt.value = kept("sessionStorage", DRAFT) ?? "";
await chat.open(kept("sessionStorage", OPEN) ?? "");
changed();
engine.start();
focusPrompt();
