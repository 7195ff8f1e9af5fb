// One step from left to right, in program order: what is sent, by axis, above what is alive in memory, by class.

const [STEP_WIDTH, LEFT, RIGHT, LANE, CURVE] = [1080, 78, 30, 46, 150];
const COLUMNS = 720; // of the curve, each with the place of its bucket where most is alive

function step() {
  const order = report.curve ? report.curve.places : inPhases();
  const place = new Map(order.map((name, i) => [name, i]));
  const groups = byAxes([...collectives.values()]);
  const lanes = groups.length * LANE,
    height = 24 + lanes + (report.curve ? CURVE + 24 : 8);
  const x = at => LEFT + ((STEP_WIDTH - LEFT - RIGHT) * at) / Math.max(1, order.length);
  const made = svg('svg', {
    class: 'step',
    viewBox: `0 0 ${STEP_WIDTH} ${height}`,
    role: 'group',
    'aria-label': 'Collectives and memory in program order',
  });
  phasesBehind(made, order, x, height);
  groups.forEach((group, i) => made.append(lane(group, 24 + i * LANE, place, x)));
  if (report.curve) made.append(...curve(24 + lanes + 12, order.length, x));
  const words = groups.length
    ? [
        `Each mark is a collective${report.timeline ? ' of a stage, of all its microbatches together' : ''}, `,
        'the taller the more bytes, on a scale of powers. Choose one to see why it is there.',
      ]
    : 'No rank sends anything.';
  return section(
    'step',
    'One step',
    words,
    element('div', { class: 'scroll', tabindex: '0', 'aria-label': 'One step, a picture' }, made),
    report.curve ? memoryLegend() : null,
  );
}

// The calls of a program, each phase together.
function inPhases() {
  const found = data.nodes.filter(node => node.op !== 'placeholder');
  return ['update', 'forward', 'backward']
    .flatMap(phase => found.filter(node => node.phase === phase))
    .map(node => node.name);
}

// The parts of a step, from where each of them starts.
function phasesBehind(made, order, x, height) {
  const starts = report.curve
    ? report.curve.starts
    : { forward: 0, backward: order.findIndex(name => values.get(name).phase === 'backward') };
  const found = Object.entries(starts).filter(([, start]) => start >= 0);
  found.forEach(([phase, start], i) => {
    const end = i + 1 < found.length ? found[i + 1][1] : order.length,
      width = x(end) - x(start);
    if (width > 0) made.append(svg('rect', { class: `phase ${phase}`, x: x(start), y: 0, width, height }));
    if (width > 70) made.append(svg('text', { class: 'label', x: x(start) + 6, y: 14 }, phase));
  });
}

function lane(group, top, place, x) {
  const found = [...collectives.values()].filter(each => each.axes.join('+') === group.key && each.at);
  const most = Math.max(...[...collectives.values()].map(each => Math.log10(each.total + 1)), 1);
  const marks = found.map((each, i) =>
    mark(each, found, i, top, x(place.get(each.at.name) ?? 0), (Math.log10(each.total + 1) / most) * (LANE - 10)),
  );
  const lines = Array.from({ length: Math.min(4, Math.floor(most / 3)) }, (_, i) => {
    const y = top + LANE - 4 - ((3 * (i + 1)) / most) * (LANE - 10);
    return [
      svg('line', { class: 'grid', x1: LEFT, x2: STEP_WIDTH - RIGHT, y1: y, y2: y }),
      svg('text', { class: 'unit', x: STEP_WIDTH - RIGHT + 5, y: y + 3 }, ['kB', 'MB', 'GB', 'TB'][i]),
    ];
  });
  return svg(
    'g',
    { class: group.axes.map(axisClass).join(' ') },
    svg('text', { class: 'lane', x: LEFT - 10, y: top + LANE - 14, 'text-anchor': 'end' }, group.key),
    svg('line', { class: 'floor', x1: LEFT, x2: STEP_WIDTH - RIGHT, y1: top + LANE - 4, y2: top + LANE - 4 }),
    lines,
    marks,
  );
}

// A mark is a link; of a lane one is reached by Tab, the others from it by the arrow keys.
function mark(each, found, i, top, x, height) {
  const say = `${each.id}: ${each.kind} over ${each.axes.join('+')}, ${bytes(each.total)}, ${each.phase}`;
  const made = svg(
    'a',
    {
      class: 'mark',
      href: address('collective', each.id),
      tabindex: i ? '-1' : '0',
      'aria-label': say,
      onkeydown: walk,
    },
    svg('title', {}, say),
    svg('rect', { class: 'reach', x: x - 4, y: top, width: 8, height: LANE - 4 }),
    svg('rect', {
      class: 'stem',
      x: x - 2,
      y: top + LANE - 4 - Math.max(2, height),
      width: 4,
      height: Math.max(2, height),
      rx: 1.5,
    }),
  );
  made.dataset.collective = each.id;
  return made;
}

function walk(event) {
  const direction = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!direction) return;
  const marks = [...event.currentTarget.parentNode.querySelectorAll('.mark')];
  const next = marks[marks.indexOf(event.currentTarget) + direction];
  if (next) next.focus();
  event.preventDefault();
}

// By class the bytes at each place, from what changes where.
function heights(length) {
  return Object.entries(report.curve.classes).map(([name, changes]) => {
    const found = new Float64Array(length + 1);
    let next = 0,
      alive = 0;
    for (let at = 0; at <= length; at++) {
      while (next < changes.length && changes[next][0] <= at) alive = changes[next++][1];
      found[at] = alive;
    }
    return { name, found };
  });
}

let peakAt = 0; // the place where most is alive

function curve(top, length, x) {
  const layers = heights(length);
  const sums = Float64Array.from({ length: length + 1 }, (_, at) => total(layers, layer => layer.found[at]));
  peakAt = sums.indexOf(Math.max(...sums));
  const most = sums[peakAt] || 1,
    y = size => top + CURVE - (size / most) * (CURVE - 14);
  const columns = sampled(sums, length);
  let below = new Float64Array(length + 1);
  const areas = layers.map(({ name, found }) => {
    const above = below.map((size, at) => size + found[at]);
    const up = columns.map(at => `L${x(at).toFixed(1)} ${y(above[at]).toFixed(1)}H${x(at + 1).toFixed(1)}`).join('');
    const down = [...columns]
      .reverse()
      .map(at => `L${x(at + 1).toFixed(1)} ${y(below[at]).toFixed(1)}H${x(at).toFixed(1)}`)
      .join('');
    below = above;
    return svg('path', { class: `memory ${name}`, d: `M${up.slice(1)}${down}Z` }, svg('title', {}, CLASSES[name]));
  });
  return [
    svg('text', { class: 'lane plainly', x: LEFT - 10, y: top + CURVE, 'text-anchor': 'end' }, '0'),
    svg('text', { class: 'lane plainly', x: LEFT - 10, y: y(most) + 4, 'text-anchor': 'end' }, bytes(most)),
    ...areas,
    svg('line', { class: 'peak', x1: LEFT, x2: STEP_WIDTH - RIGHT, y1: y(most), y2: y(most) }),
    svg('circle', { class: 'peak', cx: x(peakAt + 0.5), cy: y(most), r: 3.5 }),
  ];
}

function sampled(sums, length) {
  const width = Math.max(1, Math.ceil((length + 1) / COLUMNS)),
    found = [];
  for (let from = 0; from <= length; from += width) {
    let best = from;
    for (let at = from; at < Math.min(from + width, length + 1); at++) if (sums[at] > sums[best]) best = at;
    found.push(best);
  }
  return found;
}

function memoryLegend() {
  const layers = heights(report.curve.places.length),
    at = report.curve.places[peakAt];
  const items = layers.map(({ name, found }) =>
    element(
      'li',
      {},
      element('i', { class: `memory ${name} swatch` }),
      `${CLASSES[name]} `,
      element('b', {}, bytes(found[peakAt])),
    ),
  );
  return element(
    'div',
    { class: 'legend', id: 'memory' },
    element(
      'p',
      {},
      'Alive at the peak of ',
      element('b', {}, bytes(data.memory.peak)),
      at ? [', where ', toValue(at), ' is made:'] : ':',
    ),
    element('ul', { class: 'plain' }, items),
  );
}
