export function provenanceView() {
  return { id: "provenance", title: "Provenance", help: "", element: document.createElement("div"), unavailable: () => "Not there yet.", update() {} };
}
