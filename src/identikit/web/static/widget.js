// The page in a notebook cell.

import { mount } from "./main.js";

/** What anywidget asks for: show the model's data in the cell's element, and return what takes it away. */
export function renderWidget({ model, el }) {
  const data = model.get("data");
  const root = document.createElement("div");
  el.append(root);
  return mount(root, data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength));
}
