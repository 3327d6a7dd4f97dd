// Connects the parts of the page.

import { useKey } from "./api.js";
import { Chat } from "./chat.js";
import { Engine } from "./engine.js";
import { HeatMap } from "./heat_map.js";
import { restore } from "./settings.js";

const element = (id) => document.getElementById(id);
const prompt = element("prompt");
const problem = element("problem");
const keyForm = element("key-form");

const chat = new Chat(element("messages"), (isRunning) => {
  element("send").disabled = isRunning;
  element("stop").disabled = !isRunning;
});
const map = new HeatMap(element("experts"), element("experts-summary"), element("experts-cell"));
const engine = new Engine(map, askForKey);

async function send() {
  const text = prompt.value.trim();
  if (!text || chat.isRunning) return;
  problem.hidden = true;
  prompt.value = "";
  const length = chat.length;
  try {
    await chat.say(text);
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
    if (chat.length === length && !prompt.value) prompt.value = text;
    if (error.status === 401) askForKey();
  }
}

function askForKey() {
  if (!keyForm.hidden) return;
  keyForm.hidden = false;
  element("key").focus();
}

element("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
element("stop").addEventListener("click", () => {
  chat.stop();
  prompt.focus();
});
element("clear").addEventListener("click", () => {
  chat.clear();
  problem.hidden = true;
  prompt.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.stop();
});
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(element("key").value);
  element("key").value = "";
  keyForm.hidden = true;
  problem.hidden = true;
  prompt.focus();
  engine.start();
});

restore();
engine.start();
prompt.focus();
