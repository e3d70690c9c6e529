// The page of a file: everything is in it.

import { fromBase64 } from "./data.js";
import { mount } from "./main.js";

/** Show the data that the file holds. */
export function showReport() {
  const root = document.getElementById("identikit");
  try {
    mount(root, fromBase64(document.getElementById("identikit-data").textContent.trim()), { linked: true });
  } catch (error) {
    root.textContent = `This file could not be shown (${error.message}). It may be cut off: write it again.`;
  }
}
