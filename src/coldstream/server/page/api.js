// Requests to the server that this page came from, with the key where it wants one.

import { keep, kept } from "./kept.js";

const STORED = "coldstream-key";
let key = kept("sessionStorage", STORED) ?? "";

export class ServerError extends Error {
  // status: of HTTP; 0 if no answer came, or only a part of one. code: of the error's body, or null
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// Kept until the tab is closed.
export function useKey(text) {
  key = text;
  keep("sessionStorage", STORED, text);
}

export const hasKey = () => key !== "";

export async function getJson(path) {
  const response = await request(path, {});
  return response.json();
}

// The JSON values of a stream of events, up to [DONE]. Throws ServerError for one that says so or ends early.
export async function* events(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (value.error) throw new ServerError(response.status, value.error.message, value.error.code);
    yield value;
  }
  throw lost();
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : lost();
    });
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
}

async function request(path, options) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server does not answer.");
  }
  if (!response.ok) throw await complaint(response);
  return response;
}

async function complaint(response) {
  try {
    const { message, code } = (await response.json()).error;
    return new ServerError(response.status, message, code);
  } catch {
    return new ServerError(response.status, `The server answered with status ${response.status}.`);
  }
}

const lost = () => new ServerError(0, "The connection was lost before the answer ended.");
