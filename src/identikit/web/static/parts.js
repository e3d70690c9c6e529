// Small parts of a page.

/** An element with properties or attributes, and children; strings become text, never markup. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function button(words, help, act) {
  const made = element("button", { type: "button", title: help }, words);
  made.addEventListener("click", act);
  return made;
}

/** A number as it is shown: three digits, or with an exponent where it is tiny. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not known";
  if (value !== 0 && Math.abs(value) < 0.5 * 10 ** -digits) return value.toExponential(0).replace("e-", "e−").replace("-", "−");
  return value.toFixed(digits).replace("-", "−");
}
