export function tokensView() {
  return { id: "tokens", title: "Tokens", help: "", element: document.createElement("div"), unavailable: () => "Not there yet.", update() {} };
}
