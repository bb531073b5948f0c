"use strict";
/* Small helpers shared by all scripts of the page. */
const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") element.className = value;
    else if (key === "style") element.style.cssText = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};
const draw = (tag, attributes = {}, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
};
const percent = (value, digits) => {
  if (value === null || value === undefined) return "–";
  const shown = 100 * value;
  return (digits !== undefined ? shown.toFixed(digits) : shown >= 9.95 || shown === 0 ? shown.toFixed(0) : shown.toFixed(1)) + " %";
};
const fixed = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));
const siteVariable = { encoder_self: "var(--enc)", cross: "var(--cross)", decoder_self: "var(--dec)" };
const shortSite = { encoder_self: "encoder", cross: "cross", decoder_self: "decoder" };

const decodeBytes = (text) => {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return bytes;
};

/* Weights of one site of one sentence, unpacked once: a byte per weight, 0 = exactly zero. */
const unpack = (packed) => {
  if (packed.dense) return packed.dense;
  const [layers, heads, queries, keys] = packed.shape;
  const bits = decodeBytes(packed.bits);
  const values = decodeBytes(packed.values);
  const dense = new Uint8Array(layers * heads * queries * keys);
  let next = 0;
  for (let i = 0; i < dense.length; i += 1) if ((bits[i >> 3] >> (7 - (i & 7))) & 1) dense[i] = values[next++];
  packed.dense = dense;
  return dense;
};

const headWeights = (packed, layer, head) => {
  const [, heads, queries, keys] = packed.shape;
  const start = (layer * heads + head) * queries * keys;
  return unpack(packed).subarray(start, start + queries * keys);
};

const measure = (() => {
  const context = document.createElement("canvas").getContext("2d");
  return (text) => {
    context.font = "13.5px " + getComputedStyle(document.body).fontFamily;
    return context.measureText(text).width;
  };
})();

/* Places tokens along a line; pieces of one word stand close together. */
const layOut = (tokens) => {
  let x = 14;
  return tokens.map(([text, continues, special]) => {
    const width = Math.max(measure(text) * (special ? 0.88 : 1), 8);
    x += continues ? 7 : 17;
    const place = { text, continues, special, left: x, width, middle: x + width / 2 };
    x += width;
    return place;
  });
};

const drawTokens = (svg, places, y, side, focus) => {
  places.forEach((place, index) => {
    const group = draw("g", { class: "token", tabindex: 0, role: "button", "aria-label": place.text });
    group.append(draw("rect", { class: "hit", x: place.left - 4, y: y - 15, width: place.width + 8, height: 21, rx: 4 }));
    group.append(draw("text", { x: place.middle, y, "text-anchor": "middle", class: place.special ? "special" : null }, place.text));
    svg.append(group);
    if (place.continues) svg.append(draw("line", { class: "join", x1: place.left - 6, x2: place.left - 1, y1: y - 4, y2: y - 4 }));
    group.addEventListener("mouseenter", () => focus(side, index, false));
    group.addEventListener("mouseleave", () => focus(null));
    group.addEventListener("click", () => focus(side, index, true));
    group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); focus(side, index, true); } });
    place.group = group;
  });
};

/* Arcs of self-attention, lines of cross-attention. Returns the number of weights drawn. */
const drawArcs = (stage, queries, keys, weights, cross, least) => {
  const rows = layOut(queries);
  const columns = cross ? layOut(keys) : rows;
  const width = Math.max(rows.at(-1).left + rows.at(-1).width, columns.at(-1).left + columns.at(-1).width) + 26;
  const count = columns.length;
  const arcs = [];
  let up = 26, down = 16;
  rows.forEach((from, i) => columns.forEach((to, j) => {
    const value = weights[i * count + j];
    if (!value || value / 255 < least) return;
    const reach = Math.abs(to.middle - from.middle);
    const height = Math.min(14 + 0.34 * reach, 190);
    if (!cross && j < i) up = Math.max(up, height * 0.75 + 8);
    if (!cross && j > i) down = Math.max(down, height * 0.75 + 8);
    arcs.push({ i, j, value: value / 255, from, to, height });
  }));
  const top = cross ? 26 : up + 20;
  const bottom = cross ? top + 150 : top;
  const height = cross ? bottom + 18 : top + down + 18;
  const svg = draw("svg", { width, height, role: "img", "aria-label": "attention arcs" });
  const lines = draw("g");
  svg.append(lines);
  arcs.sort((a, b) => a.value - b.value);
  for (const arc of arcs) {
    const common = { class: "arc", "stroke-width": (0.7 + 3.3 * arc.value).toFixed(2), opacity: (0.14 + 0.8 * arc.value).toFixed(2) };
    const [a, b] = [arc.from.middle.toFixed(1), arc.to.middle.toFixed(1)];
    let shape;
    if (cross) {
      const [y1, y2] = [top + 8, bottom - 18];
      shape = draw("path", { ...common, d: `M${a} ${y1}C${a} ${y1 + 55} ${b} ${y2 - 55} ${b} ${y2}` });
    } else if (arc.i === arc.j) {
      shape = draw("circle", { ...common, cx: a, cy: top - 22, r: 5 });
    } else {
      const back = arc.j < arc.i;
      const y = back ? top - 16 : top + 8;
      const peak = back ? y - arc.height : y + arc.height;
      shape = draw("path", { ...common, d: `M${a} ${y}C${a} ${peak.toFixed(1)} ${b} ${peak.toFixed(1)} ${b} ${y}` });
    }
    shape.append(draw("title", {}, `${arc.from.text} → ${arc.to.text}: ${percent(arc.value)}`));
    arc.shape = shape;
    lines.append(shape);
  }
  let pinned = null;
  const labels = draw("g");
  const mark = (side, index) => {
    labels.replaceChildren();
    rows.concat(cross ? columns : []).forEach((place) => place.group.classList.remove("on"));
    stage.classList.toggle("focus", side !== null);
    arcs.forEach((arc) => arc.shape.classList.remove("out", "in"));
    if (side === null) return;
    (side === "key" ? columns : rows)[index].group.classList.add("on");
    for (const arc of arcs) {
      if (side !== "key" && arc.i === index) {
        arc.shape.classList.add("out");
        const y = cross ? bottom + 15 : arc.j > arc.i ? top - 19 : top + 19;
        if (cross || arc.i !== arc.j) labels.append(draw("text", { class: "share", x: arc.to.middle, y, "text-anchor": "middle" }, percent(arc.value)));
      } else if ((side === "key" || !cross) && arc.j === index) arc.shape.classList.add(side === "key" ? "out" : "in");
    }
  };
  const focus = (side, index, keep) => {
    if (keep) pinned = pinned && pinned[0] === side && pinned[1] === index ? null : [side, index];
    if (side !== null) mark(side, index);
    else if (pinned) mark(...pinned);
    else mark(null);
  };
  drawTokens(svg, rows, top, cross ? "query" : "self", focus);
  if (cross) drawTokens(svg, columns, bottom, "key", focus);
  svg.append(labels);
  stage.replaceChildren(svg);
  return arcs.length;
};

const drawMatrix = (stage, queries, keys, weights, least) => {
  const size = Math.max(9, Math.min(20, 620 / Math.max(queries.length, keys.length)));
  const left = Math.min(Math.max(...queries.map(([text]) => measure(text))), 150) + 14;
  const top = Math.min(Math.max(...keys.map(([text]) => measure(text))), 150) + 14;
  const svg = draw("svg", { width: left + keys.length * size + 20, height: top + queries.length * size + 14, role: "img", "aria-label": "attention matrix" });
  svg.append(draw("rect", { class: "frame", x: left, y: top, width: keys.length * size, height: queries.length * size }));
  const small = size < 13 ? "font-size:9.5px" : "font-size:12px";
  keys.forEach(([text, , special], j) => {
    const x = left + (j + 0.5) * size + 4;
    svg.append(draw("text", { transform: `translate(${x} ${top - 6}) rotate(-90)`, style: small, class: special ? "special" : null }, text));
  });
  let shown = 0;
  queries.forEach(([text, , special], i) => {
    svg.append(draw("text", { x: left - 7, y: top + (i + 0.5) * size + 4, "text-anchor": "end", style: small, class: special ? "special" : null }, text));
    keys.forEach(([name], j) => {
      const value = weights[i * keys.length + j] / 255;
      if (!value || value < least) return;
      shown += 1;
      const cell = draw("rect", { class: "weight", x: left + j * size + 0.75, y: top + i * size + 0.75, width: size - 1.5, height: size - 1.5, rx: 1.5, opacity: (0.12 + 0.88 * value).toFixed(2) });
      cell.append(draw("title", {}, `${text} → ${name}: ${percent(value)}`));
      svg.append(cell);
    });
  });
  stage.classList.remove("focus");
  stage.replaceChildren(svg);
  return shown;
};
