// The panels at the sides: beside the chat where there is room, over it where there is none.

import { element } from "./elements.js";

const PANELS = [
  { panel: element("list"), button: element("open-list"), fits: matchMedia("(min-width: 60rem)") },
  { panel: element("engine"), button: element("open-engine"), fits: matchMedia("(min-width: 78rem)") },
];
const scrim = element("scrim");

// Opens those panels that have room, and lets their buttons open and close them.
export function arrangePanels() {
  for (const each of PANELS) {
    show(each, each.fits.matches);
    each.fits.addEventListener("change", () => show(each, each.fits.matches));
    each.button.addEventListener("click", () => {
      const isOpening = each.panel.hidden;
      closeOverlays();
      show(each, isOpening);
      if (isOpening && !each.fits.matches) each.panel.focus();
    });
    each.panel.querySelector(".close").addEventListener("click", closeOverlays);
  }
  scrim.addEventListener("click", closeOverlays);
}

// Closes what lies over the chat. Whether anything did.
export function closeOverlays() {
  const open = PANELS.filter((each) => !each.panel.hidden && !each.fits.matches);
  for (const each of open) {
    const hadFocus = each.panel.contains(document.activeElement);
    show(each, false);
    if (hadFocus) each.button.focus();
  }
  return open.length > 0;
}

function show(each, isShown) {
  each.panel.hidden = !isShown;
  each.button.setAttribute("aria-expanded", `${isShown}`);
  scrim.hidden = !PANELS.some(({ panel, fits }) => !panel.hidden && !fits.matches);
}
