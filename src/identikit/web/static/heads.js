export function headsView() {
  return { id: "heads", title: "Heads", help: "", element: document.createElement("div"), unavailable: () => "Not there yet.", update() {} };
}
