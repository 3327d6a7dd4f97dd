// The settings of a chat: kept in this browser, and as fields of a request.

const STORED = "coldstream-settings";
const NAMES = ["system", "temperature", "seed", "max-tokens", "thinking"];
const element = (name) => document.getElementById(name);

export function restore() {
  const saved = JSON.parse(localStorage.getItem(STORED) ?? "{}");
  for (const name of NAMES) {
    element(name).value = saved[name] ?? "";
    element(name).addEventListener("change", save);
  }
}

// The system prompt as a message, if there is one.
export function systemMessages() {
  const content = element("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

// What is left empty is left out. Throws Error for what is no number of its range.
export function fields() {
  const chosen = { temperature: number("temperature"), seed: number("seed"), max_tokens: number("max-tokens") };
  const thinking = element("thinking").value;
  if (thinking) chosen.enable_thinking = thinking === "on";
  return Object.fromEntries(Object.entries(chosen).filter(([, value]) => value !== null));
}

function number(name) {
  const input = element(name);
  if (!input.checkValidity()) {
    const label = document.querySelector(`label[for="${name}"]`).textContent;
    throw new Error(`${label}: ${input.validationMessage}`);
  }
  return input.value === "" ? null : input.valueAsNumber;
}

function save() {
  localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(NAMES.map((name) => [name, element(name).value]))));
}
