// Markdown as elements. markdown-it reads it, and the elements are made from its tokens, of the kinds that TAGS names:
// neither HTML nor pictures nor links to other places than web and mail addresses can come of a text.

import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import { copyButton, make } from "./elements.js";

const TAGS = new Set(
  "a blockquote br code em h1 h2 h3 h4 h5 h6 hr li ol p s strong table tbody td th thead tr ul".split(" "),
);
const LINK = /^(https?:\/\/|mailto:)/i;
const FORMULA = /\\\([^]{1,2000}?\\\)|\\\[[^]{1,2000}?\\\]|\$\$[^]{1,2000}?\$\$/y;

const parser = new MarkdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.validateLink = (url) => LINK.test(url);
// Formulas are shown as they are written. Without this rule their backslashes were escapes and would vanish.
parser.inline.ruler.before("escape", "formula", (state, isSilent) => {
  FORMULA.lastIndex = state.pos;
  const found = FORMULA.exec(state.src);
  if (!found) return false;
  if (!isSilent) state.push("code_inline", "code", 0).content = found[0];
  state.pos += found[0].length;
  return true;
});

// An element that shows a text which may grow. Only blocks that changed are made again, and only the end of the
// text is read again, so that an answer costs the same for each token however long it is.
export class Markdown {
  constructor(className = "text") {
    this.element = make("div", className);
    this.blocks = []; // { source, info, node }, one for each block of the text
    this.begin();
  }

  // isWhole: whether no more will come. A text that does not begin with the one before is read from its start.
  show(text, isWhole) {
    if (text === this.shown && isWhole === this.isWhole) return;
    this.shown = text;
    this.isWhole = isWhole;
    text = text.replace(/\r\n?/g, "\n");
    if (isWhole || !text.startsWith(this.settled)) this.begin();
    const rest = text.slice(this.settled.length);
    const fresh = blocksOf(rest, this.environment);
    fresh.forEach((block, index) => this.put(this.numSettled + index, block));
    for (const { node } of this.blocks.splice(this.numSettled + fresh.length)) node.remove();
    // The last line may still become part of the block before it ("2" of a list), and no other line may.
    if (fresh.length > 2) {
      this.settled = text.slice(0, this.settled.length + fresh.at(-2).start);
      this.numSettled += fresh.length - 2;
    }
  }

  begin() {
    this.settled = "";
    this.numSettled = 0;
    this.environment = {};
  }

  put(index, block) {
    const old = this.blocks[index];
    if (old && old.source === block.source && old.links === block.links) return;
    this.blocks[index] = block;
    if (old && old.code && block.info !== null && old.info === block.info) {
      block.node = old.node; // so that its scroll position and the focus on its button stay
      block.code = old.code;
      block.code.textContent = codeOf(block.tokens[0]);
    } else {
      block.node = elementOf(block);
      if (old) old.node.replaceWith(block.node);
      else this.element.append(block.node);
    }
    delete block.tokens;
  }
}

// The blocks of a text that lie beside each other, each with its tokens and where it starts.
function blocksOf(text, environment) {
  const tokens = parser.parse(text, environment);
  const links = Object.keys(environment.references ?? {}).length;
  const starts = lineStarts(text);
  const blocks = [];
  for (const token of tokens) {
    if (token.level === 0 && token.nesting >= 0) {
      blocks.push({ start: starts[token.map[0]], tokens: [], links, info: infoOf(token), code: null });
    }
    blocks.at(-1).tokens.push(token);
  }
  blocks.forEach((block, index) => {
    block.source = text.slice(block.start, blocks[index + 1]?.start ?? text.length).trimEnd();
  });
  return blocks;
}

function lineStarts(text) {
  const starts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  return starts;
}

// The language of a block of code, empty if it names none; null for another token.
function infoOf(token) {
  if (token.type === "code_block") return "";
  return token.type === "fence" ? token.info.trim().split(/\s/)[0] : null;
}

function elementOf(block) {
  const root = document.createDocumentFragment();
  append(root, block.tokens, block);
  return root.firstChild ?? document.createTextNode("");
}

function append(root, tokens, block) {
  const open = [root];
  for (const token of tokens) {
    const top = open.at(-1);
    if (token.hidden) continue;
    if (token.nesting < 0) open.pop();
    else if (token.nesting > 0) {
      const made = opened(token);
      top.append(made);
      open.push(made);
    } else top.append(...leaf(token, block));
  }
}

function opened(token) {
  if (!TAGS.has(token.tag)) return make("span");
  const made = make(token.tag);
  if (token.tag === "a") link(made, token.attrGet("href"), token.attrGet("title"));
  if (token.tag === "ol" && token.attrGet("start") !== null) made.start = Number(token.attrGet("start"));
  const side = token.attrGet("style")?.match(/^text-align:(left|center|right)$/)?.[1];
  if (side) made.classList.add(side);
  return made;
}

function link(made, url, title = null) {
  if (!LINK.test(url)) return;
  made.href = url;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  if (title) made.title = title;
}

function leaf(token, block) {
  switch (token.type) {
    case "inline": {
      const part = document.createDocumentFragment();
      append(part, token.children, block);
      return [part];
    }
    case "fence":
    case "code_block":
      return [codeBlock(token, block)];
    case "code_inline":
      return [make("code", "", token.content)];
    case "softbreak":
    case "hardbreak":
      return [make("br")];
    case "hr":
      return [make("hr")];
    case "image": {
      const made = make("a", "", `picture: ${token.content || token.attrGet("src")}`);
      link(made, token.attrGet("src"));
      return [made];
    }
    default:
      return [token.content.replace(/^\[([ xX])\] /, (_, mark) => (mark === " " ? "☐ " : "☑ "))];
  }
}

function codeBlock(token, block) {
  const code = make("code", "", codeOf(token));
  block.code = code;
  const info = infoOf(token);
  const bar = make("div", "bar", make("span", "language", info || "text"));
  bar.append(copyButton("Copy code", () => code.textContent));
  const pre = make("pre", "", code);
  pre.tabIndex = 0; // so that a wide one can be scrolled with keys
  return make("figure", "code", bar, pre);
}

const codeOf = (token) => token.content.replace(/\n$/, "");
