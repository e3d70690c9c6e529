// Views draw with a pen. One pen draws on a canvas, the other writes SVG, so that what is exported is what was seen.

/** Prepare a canvas for a size in CSS pixels and return a pen for it. */
export function canvasPen(canvas, width, height, scale = globalThis.devicePixelRatio || 1) {
  const [across, down] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const draw = (path, fill, { stroke, line = 1, opacity = 1 } = {}) => {
    context.globalAlpha = opacity;
    context.beginPath();
    path();
    if (fill) {
      context.fillStyle = fill;
      context.fill();
    }
    if (stroke) {
      context.strokeStyle = stroke;
      context.lineWidth = line;
      context.stroke();
    }
    context.globalAlpha = 1;
  };
  return {
    width,
    height,
    rect(x, y, w, h, fill, style) {
      draw(() => context.rect(x, y, w, h), fill, style);
    },
    line(x1, y1, x2, y2, stroke, { width: line = 1, opacity = 1 } = {}) {
      const path = () => (context.moveTo(x1, y1), context.lineTo(x2, y2));
      draw(path, null, { stroke, line, opacity });
    },
    circle(x, y, radius, fill, style) {
      draw(() => context.arc(x, y, radius, 0, 2 * Math.PI), fill, style);
    },
    text(words, x, y, fill, { size = 12, align = "left", weight = "normal", turn = 0, widest } = {}) {
      context.save();
      context.translate(x, y);
      context.rotate(turn);
      context.fillStyle = fill;
      context.font = `${weight} ${size}px ${FONT}`;
      context.textAlign = align;
      context.textBaseline = "middle";
      context.fillText(widest ? shortened(words, widest, size) : words, 0, 0);
      context.restore();
    },
    /** Cells of a map, row by row: `colours` holds four bytes (RGBA) for each; `smooth` for a photo. */
    cells(x, y, w, h, columns, rows, colours, smooth = false) {
      context.imageSmoothingEnabled = smooth || columns > w * scale; // smaller than drawn: mean colours, no cell is lost
      context.drawImage(cellImage(columns, rows, colours), x, y, w, h);
    },
  };
}

const cellImages = new WeakMap(); // by their colours: a map is put into an image once, not in every frame

function cellImage(columns, rows, colours) {
  if (!cellImages.has(colours)) {
    const image = document.createElement("canvas");
    image.width = columns;
    image.height = rows;
    image.getContext("2d").putImageData(new ImageData(colours, columns, rows), 0, 0);
    cellImages.set(colours, image);
  }
  return cellImages.get(colours);
}

export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

/** Words cut to a width, with an ellipsis; a guess from the number of letters, the same for both pens. */
function shortened(words, widest, size = 12) {
  const most = Math.max(1, Math.floor(widest / (size * 0.56)));
  if (words.length <= most) return words;
  const distinct = words.replace(/^<image (.+)>$/, "$1"); // else all patches would be cut to the same words
  return distinct.length <= most ? distinct : `${distinct.slice(0, Math.max(1, most - 1))}…`;
}

/** A pen that writes SVG; `finish()` returns the document. */
export function svgPen(width, height, background) {
  const parts = [];
  const number = (value) => Number(value.toFixed(2));
  const safe = (words) => String(words).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`).replace(/[^\t\n\r -\uFFFD]/g, "");
  const look = (fill, { stroke, line = 1, opacity = 1 }) =>
    `fill="${fill || "none"}"${stroke ? ` stroke="${stroke}" stroke-width="${line}"` : ""}${opacity < 1 ? ` opacity="${opacity}"` : ""}`;
  return {
    width,
    height,
    rect(x, y, w, h, fill, style = {}) {
      parts.push(`<rect x="${number(x)}" y="${number(y)}" width="${number(w)}" height="${number(h)}" ${look(fill, style)}/>`);
    },
    line(x1, y1, x2, y2, stroke, { width: line = 1, opacity = 1 } = {}) {
      parts.push(`<line x1="${number(x1)}" y1="${number(y1)}" x2="${number(x2)}" y2="${number(y2)}" stroke="${stroke}" stroke-width="${number(line)}" opacity="${opacity}"/>`);
    },
    circle(x, y, radius, fill, style = {}) {
      parts.push(`<circle cx="${number(x)}" cy="${number(y)}" r="${number(radius)}" ${look(fill, style)}/>`);
    },
    text(words, x, y, fill, { size = 12, align = "left", weight = "normal", turn = 0, widest } = {}) {
      const anchor = { left: "start", center: "middle", right: "end" }[align];
      const place = `translate(${number(x)} ${number(y)})${turn ? ` rotate(${number((turn * 180) / Math.PI)})` : ""}`;
      parts.push(`<text transform="${place}" font-size="${size}" font-weight="${weight}" text-anchor="${anchor}" dominant-baseline="central" fill="${fill}">${safe(widest ? shortened(words, widest, size) : words)}</text>`);
    },
    cells(x, y, w, h, columns, rows, colours, smooth = false) {
      const image = cellImage(columns, rows, colours);
      parts.push(`<image x="${number(x)}" y="${number(y)}" width="${number(w)}" height="${number(h)}" preserveAspectRatio="none" style="image-rendering:${smooth ? "auto" : "pixelated"}" href="${image.toDataURL("image/png")}"/>`);
    },
    finish() {
      return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family='${FONT.replace(/'/g, "")}'><rect width="100%" height="100%" fill="${background}"/>${parts.join("")}</svg>`;
    },
  };
}
