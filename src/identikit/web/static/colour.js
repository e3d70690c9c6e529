// Colours. One diverging scale for all maps, blue below 0 and orange above, which most colour-blind readers tell apart.

export const THEMES = {
  light: { paper: "#ffffff", ink: "#1d232b", soft: "#5c6773", faint: "#d9dee4", wash: "#f4f6f8", plus: "#b3500b", minus: "#1f5fa8", sure: "#0b6e63", focus: "#7a3ea3" },
  dark: { paper: "#14181d", ink: "#e9edf1", soft: "#9aa6b2", faint: "#39424c", wash: "#1d232a", plus: "#f59a4d", minus: "#6fb1f2", sure: "#4fc3b0", focus: "#cf9df0" },
};

/** Give a page its theme: the style sheet takes the colours from here. */
export function setTheme(root, theme) {
  if (root.dataset.theme === theme) return;
  root.dataset.theme = theme;
  for (const [name, colour] of Object.entries(THEMES[theme])) root.style.setProperty(`--${name}`, colour);
}

const parts = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

/** A colour between two, as numbers. */
export function mixed(from, to, share) {
  const [a, b] = [parts(from), parts(to)];
  return a.map((part, at) => Math.round(part + (b[at] - part) * Math.min(1, Math.max(0, share))));
}

export const css = (rgb) => `rgb(${rgb.join(",")})`;

/** The diverging scale: a function from a number between -most and most to a colour; NaN is the wash. */
export function diverging(colours, most = 1) {
  return (value) => {
    if (Number.isNaN(value)) return parts(colours.wash);
    const share = Math.sqrt(Math.min(1, Math.abs(value) / most)); // the root lets small weights be seen
    return mixed(colours.paper, value < 0 ? colours.minus : colours.plus, share);
  };
}

/** Colours that tell up to eight series apart, also for colour-blind readers (Okabe and Ito), and grey for the rest. */
export const SERIES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8a6d3b"];
