// The numbers of another view as a table, to be read without a mouse.

import { element, number } from "./parts.js";

const NUMBERS_LISTED = 300; // rows of a table that are shown; the CSV has all

export function numbersView(site, panels) {
  const choice = element("select", { "aria-label": "Whose numbers" });
  const listed = panels.filter(({ view }) => view.table);
  for (const { view } of listed) choice.append(element("option", { value: view.id }, view.title));
  choice.value = "edge";
  choice.addEventListener("change", () => site.redraw());
  const table = element("table", { class: "numbers" });
  const more = element("p", { class: "help" });
  const box = element("div", { class: "numbers-box", tabindex: "0", role: "region", "aria-label": "Numbers" }, table);
  const whole = element("div", {}, element("label", {}, "Numbers of ", choice), box, more);
  const current = () => listed.find(({ view }) => view.id === choice.value).view;
  const numbersTable = (state) => (current().unavailable() ? { columns: [], rows: [] } : current().table(state));
  return {
    id: "numbers",
    title: "Numbers",
    help: "The numbers of a view as a table.",
    element: whole,
    unavailable: () => null,
    update(state) {
      const { columns, rows } = numbersTable({ ...state, hoverQuery: -1, hoverKey: -1 });
      const text = (value) => (typeof value === "number" && !Number.isInteger(value) ? number(value, 4) : String(value ?? ""));
      const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
      const body = rows.slice(0, NUMBERS_LISTED).map((row) => element("tr", {}, ...row.map((value) => element("td", {}, text(value)))));
      table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
      const rest = rows.length - NUMBERS_LISTED;
      more.textContent = current().unavailable() ?? (rest > 0 ? `${rest} more rows: export them as CSV.` : "");
    },
    table: numbersTable,
    python: (state) => current().python(state),
    describe: () => "",
  };
}
