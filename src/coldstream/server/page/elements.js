// Makers of elements. Texts enter as texts: nothing on this page is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const element = (id) => document.getElementById(id);

export function make(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function icon(name) {
  const drawn = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  drawn.append(use);
  drawn.setAttribute("aria-hidden", "true");
  return drawn;
}

// A button that shows a symbol and is called by its label.
export function iconButton(name, label, onClick) {
  const made = make("button", "icon", icon(name));
  made.type = "button";
  made.title = label;
  made.setAttribute("aria-label", label);
  made.addEventListener("click", onClick);
  return made;
}

export function textButton(label, onClick, className = "") {
  const made = make("button", className, label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

// A button that copies what `text` returns when it is pressed, and says so for a moment.
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const isCopied = await copy(text());
    button.replaceChildren(icon(isCopied ? "done" : "close"));
    button.title = isCopied ? "Copied" : "This browser does not allow copying";
    button.setAttribute("aria-label", button.title);
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.title = label;
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}

// The clipboard's interface exists on HTTPS and on this machine only; elsewhere a selection is copied.
async function copy(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  const area = make("textarea", "unseen");
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}
