// The engine as it is: asks the server once a second, and shows figures and rates between two answers.

import { getJson } from "./api.js";

const EVERY_MS = 1000;
const show = (id, text) => {
  const element = document.getElementById(id);
  if (element.textContent !== text) element.textContent = text;
};

export class Engine {
  // map: a HeatMap; onRefused: called when the server wants a key; onSeen: called with each state of the server, and
  // whether another engine or model gave it than the one before
  constructor(map, onRefused, onSeen) {
    this.map = map;
    this.onRefused = onRefused;
    this.onSeen = onSeen;
    this.before = null;
    this.known = null;
    this.numLooks = 0;
    document.addEventListener("visibilitychange", () => this.start());
  }

  // Asks at once, and then for as long as the page is seen.
  start() {
    clearTimeout(this.timer);
    if (document.visibilityState === "hidden") return;
    this.look().finally(() => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.start(), EVERY_MS);
    });
  }

  // What an earlier look finds is left out: it may have been refused with the key before.
  async look() {
    this.numLooks += 1;
    const number = this.numLooks;
    const isLatest = () => number === this.numLooks;
    try {
      const live = await getJson("live");
      if (isLatest()) this.take(live);
    } catch (error) {
      if (isLatest()) this.refuse(error);
    }
  }

  refuse(error) {
    show("state", error.message);
    document.getElementById("state").dataset.state = "away";
    this.known = null;
    if (error.status === 401) this.onRefused();
  }

  take(live) {
    show("model", live.model_alias ?? "no model yet");
    show("state", stateOf(live));
    document.getElementById("state").dataset.state = live.state;
    const now = live.statistics;
    if (now) this.figures(now, live);
    this.map.show(live.experts);
    this.before = now && { statistics: now, clock: live.clock_s };
    const known = live.model_alias && `${live.model_alias} ${live.restarts} ${live.unloads}`;
    this.onSeen(live, known !== null && known !== this.known);
    this.known = known;
  }

  figures(now, live) {
    const since = (name) => now[name] - (this.before?.statistics[name] ?? now[name]);
    const seconds = live.clock_s - (this.before?.clock ?? live.clock_s);
    const rate = (name) => (seconds > 0 ? (since(name) / seconds).toFixed(1) : "–");
    show("decode-rate", rate("generated_tokens"));
    show("prompt-rate", rate("prompt_tokens"));
    show("running", `${now.running}`);
    show("waiting", `${now.waiting}`);
    show("hit-rate", hitRate(now, since));
    show("accepted", now.drafts ? (1 + now.accepted_tokens / now.drafts).toFixed(2) : "no drafts");
    show("reused", percent(now.reused_tokens, now.prompt_tokens));
    show("prefixes", `${now.prefixes.kept}`);
    show("blocks", cacheInUse(now.memory, now.free_memory));
  }
}

function stateOf(live) {
  const progress = live.progress.total ? `: ${live.progress.what}, ${percent(live.progress.done, live.progress.total)}` : "";
  const reason = live.reason ? ` (${live.reason})` : "";
  return `${live.state}${progress}${reason}`;
}

// Of the uses since the last answer, or since the start if there were none.
function hitRate(now, since) {
  if (now.expert_hits === null) return "all";
  const recent = since("expert_hits") + since("expert_misses");
  return recent ? percent(since("expert_hits"), recent) : percent(now.expert_hits, now.expert_hits + now.expert_misses);
}

// Layers with windows may have blocks of their own, and either kind can be the one that an answer waits for.
function cacheInUse(memory, free) {
  const share = (blocks) => percent(memory[blocks] - free[blocks], memory[blocks]);
  const windows = memory.num_window_blocks ? `, windows ${share("num_window_blocks")}` : "";
  return `${share("num_blocks")}${windows}`;
}

function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "–";
}
