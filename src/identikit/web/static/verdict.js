export function verdictView() {
  return { id: "verdict", title: "Verdict", help: "", element: document.createElement("div"), unavailable: () => "Not there yet.", update() {} };
}
