// What went wrong, for people: a title, what to do about it, the buttons that help, and the server's own words as `detail`.

import { hasKey } from "./api.js";

// The buttons that a problem can offer: "retry" sends again, "new" begins a new chat, "settings" opens the settings.
// `whenReady`: whether the page sends again by itself once the engine is ready.
export function explained(error) {
  const { status, code, message } = error;
  if (status === 401) {
    return hasKey()
      ? problem("Wrong API key", "The server does not know this key. Enter another one.", [])
      : problem("API key needed", "The server answers only to those who have a key. Enter yours.", []);
  }
  if (code === "context_length_exceeded") {
    const text = "Begin a new chat, edit an earlier message to go on from there, or start the server with a larger --ctx-size.";
    return { ...problem("The context is full", text, ["new"]), detail: message };
  }
  if (status === 429) {
    return { ...problem("The server is busy", "Other requests wait already. Try again in a moment.", ["retry"]), detail: message };
  }
  if (code === "model_unavailable") return problem("The model cannot be used", message, ["retry"]);
  if (status === 503 && code !== "out_of_memory") {
    const text = "The message is sent as soon as the engine is ready.";
    return { ...problem("The engine is not ready", text, ["retry"]), detail: message, whenReady: true };
  }
  if (code === "out_of_memory") {
    return { ...problem("Not enough memory", "Try again once other answers have ended, or begin a shorter chat.", ["retry", "new"]), detail: message };
  }
  if (status === 413) return problem("The message is too long", message, ["new"]);
  if (error.isStorage) {
    return problem("The conversation is not kept", `This browser could not write it: ${message}. Delete or export others.`, []);
  }
  if (error.isImport) return problem("The file cannot be imported", message, []);
  if (error.isSetting) return problem("A setting cannot be used", message, ["settings"]);
  if (status === 0) return problem("No connection", `${message} Check that it runs, and try again.`, ["retry"]);
  return problem(status >= 500 ? "The server could not answer" : "The server refused the request", message, ["retry"]);
}

const problem = (title, text, buttons) => ({ title, text, buttons, detail: "", whenReady: false });
