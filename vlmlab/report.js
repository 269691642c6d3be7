"use strict";

// Charts: every specification replaces the still picture before it.
for (const data of document.querySelectorAll('script[type="application/vnd.vegalite+json"]')) {
  const place = data.previousElementSibling;
  vegaEmbed(place, JSON.parse(data.textContent), { actions: false, renderer: "svg" }).then((shown) => {
    place.view = shown.view; // for whoever wants to look, a test included
  });
}

// bfloat16 and float32 arithmetic as both engines do it. A product of two bfloat16 is exact in a double, a sum is
// rounded to float32 first, as the hardware does.
const f32 = Math.fround;
const words = new Uint32Array(1);
const single = new Float32Array(words.buffer);
function bf16(x) {
  single[0] = x;
  if (!Number.isFinite(single[0])) return single[0];
  words[0] = ((words[0] + 0x7fff + ((words[0] >>> 16) & 1)) & 0xffff0000) >>> 0;
  return single[0];
}

function normalise(x, eps) {
  let sum = 0;
  for (const v of x) sum += f32(v * v);
  const scale = f32(1 / f32(Math.sqrt(f32(f32(sum / x.length) + f32(eps)))));
  return x.map((v) => f32(v * scale));
}
const rounded = (x) => x.map(bf16);
const hfNorm = (x, w, eps) => rounded(normalise(x, eps)).map((v, i) => bf16(v * w[i]));
const sglangNorm = (x, w, eps) => normalise(x, eps).map((v, i) => bf16(f32(v * w[i])));
const sum = (a, b) => a.map((v, i) => f32(v + b[i]));

const OPERATIONS = {
  rms_norm: (row) => [hfNorm(row.x, row.weight, row.eps), sglangNorm(row.x, row.weight, row.eps)],
  residual_sum: (row) => {
    const total = sum(row.x, row.residual);
    return [rounded(total), total].map((read) => sglangNorm(read, row.weight, row.eps));
  },
  deepstack_order: (row) => [
    rounded(sum(rounded(sum(row.residual, row.x)), row.features)),
    rounded(sum(row.residual, rounded(sum(row.x, row.features)))),
  ],
};

const bits = (x) => {
  single[0] = x;
  return words[0];
};
const same = (a, b) => a.filter((v, i) => bits(v) === bits(b[i])).length;

function element(name, text) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return made;
}

for (const data of document.querySelectorAll('script[type="application/json"].operation')) {
  const row = JSON.parse(data.textContent);
  const place = data.previousElementSibling;
  const editable = ["residual", "x", "features", "weight"].filter((name) => name in row);
  const captured = { hf: row.hf, sglang: row.sglang };
  const table = element("table");
  const said = element("p");
  said.setAttribute("role", "status");

  function show() {
    const [hf, sglang] = OPERATIONS[row.name](row);
    said.textContent =
      `Computed in this page: ${same(hf, captured.hf)} of ${hf.length} channels have the bits of Transformers' way, ` +
      `${same(sglang, captured.sglang)} those of SGLang's; the two differ in ${hf.length - same(hf, sglang)}.`;
    row.shown.forEach((channel, i) => {
      const cells = table.rows[i + 1].cells;
      cells[editable.length + 1].textContent = hf[channel];
      cells[editable.length + 2].textContent = sglang[channel];
      cells[editable.length + 3].textContent = f32(sglang[channel] - hf[channel]);
    });
  }

  const head = table.insertRow();
  for (const title of ["channel", ...editable, "Transformers", "SGLang", "difference"]) {
    const cell = element("th", title);
    cell.scope = "col";
    head.append(cell);
  }
  for (const channel of row.shown) {
    const line = table.insertRow();
    line.insertCell().textContent = channel;
    for (const name of editable) {
      const input = element("input");
      input.type = "number";
      input.step = "any";
      input.value = row[name][channel];
      input.setAttribute("aria-label", `${name} of channel ${channel}`);
      input.addEventListener("change", () => {
        row[name][channel] = bf16(Number(input.value) || 0);
        input.value = row[name][channel];
        show();
      });
      line.insertCell().append(input);
    }
    for (let i = 0; i < 3; i++) line.insertCell();
  }
  place.replaceChildren(said, table);
  show();
}
