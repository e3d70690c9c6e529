// What the views show: one safetensors file, with JSON about it in the file's metadata. See web/payload.py.

const READERS = {
  F64: (bytes) => new Float64Array(bytes),
  F32: (bytes) => new Float32Array(bytes),
  I32: (bytes) => new Int32Array(bytes),
  U8: (bytes) => new Uint8Array(bytes),
  F16: (bytes) => Float32Array.from(new Uint16Array(bytes), fromHalf),
  BF16: (bytes) => new Float32Array(Uint32Array.from(new Uint16Array(bytes), (bits) => bits << 16).buffer),
};

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** Read a safetensors file: `{about, array(name), has(name)}`; arrays are decoded when first asked for. */
export function decode(buffer) {
  const size = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  const about = JSON.parse(header.__metadata__.identikit);
  const decoded = new Map();
  return {
    about,
    has: (name) => name in header,
    /** An array as `{shape, data}`; null where the file does not hold it. */
    array(name) {
      if (!(name in header)) return null;
      if (!decoded.has(name)) {
        const { dtype, shape, data_offsets: [from, to] } = header[name];
        decoded.set(name, { shape, data: READERS[dtype](buffer.slice(8 + size + from, 8 + size + to)) });
      }
      return decoded.get(name);
    },
  };
}

/** Bytes written as base64. */
export function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text).buffer;
  const plain = atob(text);
  const bytes = new Uint8Array(plain.length);
  for (let i = 0; i < plain.length; i += 1) bytes[i] = plain.charCodeAt(i);
  return bytes.buffer;
}

/** Tokens by the name that tells them apart: `the@24` where a token repeats. */
export function tokenNames(tokens, places = tokens.keys()) {
  const counts = new Map();
  for (const token of tokens) counts.set(token, (counts.get(token) ?? 0) + 1);
  return Array.from(places, (place, at) => (counts.get(tokens[at]) > 1 ? `${tokens[at]}@${place}` : tokens[at]));
}
