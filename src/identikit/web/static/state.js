// One state for all views. The address keeps what a reader chose (after the #), so that a link shows the same view.

/** What the address can hold, with the default of each. */
export const CHOICES = {
  layer: 0, // places in the file
  head: 0,
  query: 0, // the pinned token
  key: -1, // the pinned key; -1: none
  tab: "tokens",
  heads: "scatter", // or grid
  x: "", // readings of the scatter, by name; empty: as the file says
  y: "",
  shape: "matrix", // or lines
  map: "raw", // or effective, simplex, null: the map that lines and strips show
  measure: "", // a reading of heads, by name, in place of the weights; empty: the weights
  beside: "", // a reading of layers that stands beside provenance; empty: the first
  overlay: "raw", // or lower, upper, effective, none: what is drawn on an image
  overview: false, // of an image in tiles: the whole of it made smaller, which the model reads beside them
  words: false,
  special: true,
  sort: "weight", // or width, or text
  epsilon: 0, // place in the grid
  threshold: 0.03,
  strip: "all", // or head: whose certainty shades the tokens of the verdict
  from: 0, // first token of the window of a long text
  theme: "", // light or dark; empty: as the system says
  embed: false,
};

export function createStore(address = "", first = {}) {
  let state = { ...CHOICES, ...first, ...parse(address), hoverQuery: -1, hoverKey: -1, moved: null };
  const listeners = new Set();
  return {
    get: () => state,
    /** Change some of the state; views are told once per frame. A move of a row ends when another row is chosen. */
    set(change) {
      const before = state;
      state = { ...state, ...change };
      const isOtherRow = ["layer", "head", "query"].some((name) => before[name] !== state[name]);
      if (isOtherRow && !("moved" in change)) state.moved = null;
      for (const listener of listeners) listener(state, before);
    },
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

/** The address of a state: what differs from the usual, or from what this file opens with (`first`). */
export function address(state, first = {}) {
  const opening = { ...CHOICES, ...first };
  const changed = Object.keys(CHOICES).filter((name) => state[name] !== CHOICES[name] || state[name] !== opening[name]);
  const plain = (value) => (typeof value === "boolean" ? Number(value) : value);
  return changed.map((name) => `${name}=${encodeURIComponent(plain(state[name]))}`).join("&");
}

export function parse(text) {
  const choices = {};
  for (const [name, value] of new URLSearchParams(text.replace(/^#/, ""))) {
    const usual = CHOICES[name];
    if (typeof usual === "number" && value.trim() !== "" && Number.isFinite(Number(value))) choices[name] = Number(value);
    else if (typeof usual === "boolean") choices[name] = value === "1";
    else if (typeof usual === "string") choices[name] = value;
  }
  return choices;
}
