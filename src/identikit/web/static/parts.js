// Small parts of a page.

/** An element with properties or attributes, and children; strings become text, never markup. */
export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

export function button(words, help, act) {
  const node = element("button", { type: "button", title: help }, words);
  node.addEventListener("click", act);
  return node;
}

/** A function that draws in the next frame, once, however often it is called before. */
export function onceAFrame(draw) {
  let isRequested = false;
  const frame = () => {
    isRequested = false;
    draw();
  };
  return () => {
    if (!isRequested) requestAnimationFrame(frame);
    isRequested = true;
  };
}

/** A share as a percentage, 0 or 100 only where it is that but for rounding, as `percent` in results/words.py. */
export function percent(share) {
  if (share >= 0.9995 && share < 1 - 1e-6) return ">99.9%";
  if (share > 1e-6 && share < 0.0005) return "<0.1%";
  const near = (share >= 0.995 && share < 1 - 1e-6) || (share > 1e-6 && share < 0.005);
  return `${(100 * share).toFixed(near ? 1 : 0)}%`;
}

/** A share with its standard error, if it is estimated; where that is as large, only what it is at most. */
export function estimatedShare(share, error) {
  if (error === null) return percent(share);
  return error < share ? `${percent(share)} ± ${percent(error)}` : `at most ${percent(Math.min(1, share + 2 * error))}`;
}

/** A number in three digits, or with an exponent where it is tiny. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not known";
  if (value !== 0 && Math.abs(value) < 0.5 * 10 ** -digits) return value.toExponential(0).replace("e-", "e−").replace("-", "−");
  return value.toFixed(digits).replace("-", "−");
}
