// The page of a file: everything is in it.

import { fromBase64 } from "./data.js";
import { mount } from "./main.js";

/** Show the data that the file holds. */
export function showReport() {
  showFile((root) => mount(root, fileData("identikit-data"), { linked: true }));
}

/** Let something be shown in the page of a file, or say that the file is damaged. */
export function showFile(show) {
  const root = document.getElementById("identikit");
  try {
    show(root);
  } catch (error) {
    root.textContent = `This file could not be shown (${error.message}). It may be cut off: write it again.`;
  }
}

/** The data that a file holds under an id. */
export const fileData = (id) => fromBase64(document.getElementById(id).textContent.trim());
