// The settings of answers: kept in this browser, shown beside the model's own, and as fields of a request.

import { element } from "./elements.js";
import { keep, kept } from "./kept.js";

const STORED = "coldstream-settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
const NAMES = ["system", ...NUMBERS, "thinking", "reasoning_effort"];

export class SettingError extends Error {
  isSetting = true;
}

export function restoreSettings() {
  const saved = JSON.parse(kept("localStorage", STORED) ?? "{}");
  for (const name of NAMES) {
    element(name).value = saved[name] ?? "";
    element(name).addEventListener("change", save);
  }
  element("reset").addEventListener("click", () => {
    for (const name of NAMES) element(name).value = "";
    save();
  });
}

// Shows what the model does where nothing is chosen, and only those settings that its chat template knows.
// props: of the server
export function showDefaults(props) {
  const defaults = props.default_generation_settings.params;
  for (const name of NUMBERS) {
    if (defaults[name] !== undefined) element(name).placeholder = `${defaults[name]}`;
  }
  for (const field of document.querySelectorAll("[data-template]")) {
    field.hidden = !props.chat_template?.includes(field.dataset.template);
  }
}

// The system message, if there is one.
export function systemMessages() {
  const content = element("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

// What is left empty, or is no setting of this model, is left out. Throws SettingError for what is no number of its range.
export function fields() {
  const chosen = Object.fromEntries(NUMBERS.map((name) => [name, number(name)]));
  const thinking = shown("thinking");
  if (thinking) chosen.enable_thinking = thinking === "on";
  chosen.reasoning_effort = shown("reasoning_effort") || null;
  return Object.fromEntries(Object.entries(chosen).filter(([, value]) => value !== null));
}

const shown = (name) => (element(name).parentElement.hidden ? "" : element(name).value);

function number(name) {
  const input = element(name);
  if (!input.checkValidity()) {
    const label = document.querySelector(`label[for="${name}"]`).textContent;
    throw new SettingError(`${label}: ${input.validationMessage}`);
  }
  return input.value === "" ? null : input.valueAsNumber;
}

function save() {
  keep("localStorage", STORED, JSON.stringify(Object.fromEntries(NAMES.map((name) => [name, element(name).value]))));
}
