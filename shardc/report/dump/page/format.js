// How numbers, types and axes print; colours stand beside names, never in their place.

function bytes(count) {
  for (const unit of ['B', 'kB', 'MB', 'GB']) {
    if (count < 1000) return `${unit === 'B' ? count : count.toFixed(count < 10 ? 2 : 1)}\u00a0${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)}\u00a0TB`;
}

function grouped(count) {
  return String(count).replace(/\B(?=(\d{3})+$)/g, ',');
}

function counted(count, name) {
  const ending = count === 1 ? '' : name.endsWith('ch') ? 'es' : 's';
  return `${grouped(count)} ${name}${ending}`;
}

function share(part, whole) {
  const percent = whole ? (100 * part) / whole : 0;
  return percent > 0 && percent < 1 ? '<\u00a01\u00a0%' : `${percent.toFixed(0)}\u00a0%`;
}

function baseAxis(part) {
  return part.split(':')[0];
}

// The class that gives an axis its colour: by its place in the mesh; one that is no axis of ranks has none.
function axisClass(part) {
  const place = Object.keys(axes).indexOf(baseAxis(part));
  return place < 0 ? 'axis none' : `axis axis-${place % 8}`;
}

function axisTag(part) {
  return element('span', { class: `${axisClass(part)} tag` }, part);
}

function axisTags(parts) {
  return parts.map(axisTag);
}

// `f32[8@dp, 64]{sum tp}`, its axes coloured.
function typeText(text) {
  const made = element('code', { class: 'type' });
  let end = 0;
  for (const found of text.matchAll(/@([\w:()+]*[\w])|\{(\w+) ([^}]*)\}/g)) {
    made.append(text.slice(end, found.index));
    if (found[1]) {
      found[1].split('+').forEach((part, i) => made.append(cut(i ? '+' : '@', part)));
    } else {
      const parts = found[3]
        .split(' ')
        .map((part, i) => [i ? ' ' : '', element('span', { class: axisClass(part) }, part)]);
      made.append(element('span', { class: 'partial' }, `{${found[2]} `, ...parts.flat(), '}'));
    }
    end = found.index + found[0].length;
  }
  made.append(text.slice(end));
  return made;
}

function cut(sign, part) {
  return element('span', { class: axisClass(part) }, sign + part);
}

// The axes that cut a type.
function axesOf(type) {
  return [...type.matchAll(/@([\w:()+]*[\w])/g)].flatMap(found => found[1].split('+'));
}

function meshText() {
  return Object.entries(axes)
    .map(([name, size]) => `${name}=${size}`)
    .join(', ');
}

// A bar in parts: [{size, class, label}], each as long as its share of `whole`.
function bar(parts, whole, label) {
  const pieces = parts.map(part =>
    element('i', {
      class: part.class,
      title: part.label,
      vars: { width: `${whole ? (100 * part.size) / whole : 0}%` },
    }),
  );
  return element('span', { class: 'meter', role: 'img', 'aria-label': label }, pieces);
}
