// Short texts that the browser keeps. One that keeps nothing for pages shows this page all the same.

export function kept(storage, name) {
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

// storage: "localStorage", for all tabs and until it is deleted, or "sessionStorage", for this tab
export function keep(storage, name, text) {
  try {
    window[storage].setItem(name, text);
  } catch {
    // It is forgotten with the tab, which the list of conversations says.
  }
}
