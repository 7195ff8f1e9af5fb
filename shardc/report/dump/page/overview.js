// The first screen: what is cut how, what is sent, what a rank holds, and what to look at.

const CLASSES = {
  parameters: 'parameters',
  inputs: 'inputs and buffers',
  gathered: 'gathered',
  saved: 'saved for backward',
  outputs: 'outputs',
  gradients: 'gradients',
  working: 'working',
  optimizer: `optimizer (${report.optimizer})`,
};
const PHASES = ['update', 'forward', 'backward'].filter(phase => data.collectives.some(each => each.phase === phase));

// Of a pipeline what the rank sends that sends most; all other ranks send the same.
const busiest =
  [...new Set(places)]
    .map(rank => [rank, total(ofRank(rank), each => each.total)])
    .sort((a, b) => b[1] - a[1])
    .map(([rank]) => rank)[0] ?? 0;
const sentByRank = ofRank(busiest);
const sentBytes = total(sentByRank, each => each.total);
const sentCount = total(sentByRank, each => each.count);

function ofRank(rank) {
  return [...collectives.values()].filter(each => each.rank === rank);
}

function overview() {
  const train = PHASES.includes('backward') || data.nodes.some(node => node.phase === 'backward');
  const atMost = report.timeline ? 'at most ' : '';
  const words = [
    'on ',
    Object.entries(axes).flatMap(([name, size], i) => [
      i ? ' × ' : '',
      element('span', { class: `${axisClass(name)} name` }, `${name}=${size}`),
    ]),
    `, ${counted(ranks, 'rank')}. In one ${train ? 'training step' : 'forward'} a rank sends ${atMost}`,
    element('b', {}, bytes(sentBytes)),
    ` in ${counted(sentCount, 'collective')}`,
    ' and holds at most ',
    element('b', {}, bytes(data.memory.peak)),
    ` at a time, with the optimizer (${report.optimizer}).`,
  ];
  const cards = element('div', { class: 'cards' }, cutCard(), sentCard(), heldCard(), lookCard());
  return element(
    'section',
    { id: 'overview', 'aria-label': 'Overview', 'data-title': 'Overview' },
    element('h1', {}, report.model),
    element('p', { class: 'headline' }, words),
    cards,
  );
}

function card(title, ...children) {
  return element('article', { class: 'card' }, element('h3', {}, title), ...children);
}

function cutCard() {
  const byText = new Map();
  for (const pin of report.pins) byText.set(pin.text, [...(byText.get(pin.text) || []), pin]);
  const lines = [...byText].map(([text, pins]) =>
    element(
      'li',
      {},
      link('annotation', text, annotationText(text)),
      element('span', { class: 'count' }, ` ${pins.length > 1 ? counted(pins.length, pins[0].kind) : pins[0].kind}`),
    ),
  );
  const held = [...stored.values()].filter(entry => entry.kind === 'parameter');
  const [whole, here] = [
    total(held, entry => entry.whole_bytes),
    report.timeline ? data.memory.parameters : total(held, entry => entry.bytes),
  ];
  return card(
    'What is cut, and how',
    element(
      'p',
      { class: 'figure' },
      element('b', {}, share(here, whole)),
      ` of ${bytes(whole)} of parameters on a rank${report.timeline ? `, in ${counted(places.length, 'stage')}` : ''}`,
    ),
    meters(
      partsBy(
        held,
        entry => axesCutting(entry),
        entry => entry.whole_bytes,
      ),
      whole,
      bytes,
    ),
    element(
      'p',
      { class: 'hint' },
      lines.length
        ? `From ${counted(lines.length, 'annotation')}:`
        : 'No annotations: everything is whole on every rank.',
    ),
    element('ul', { class: 'plain annotations' }, lines),
  );
}

// `name: P('dp')` with the axes coloured.
function annotationText(text) {
  const pieces = text
    .split(/('[^']*')/)
    .map(piece =>
      piece.startsWith("'") && axes[baseAxis(piece.slice(1, -1))]
        ? element('span', { class: axisClass(piece.slice(1, -1)) }, piece)
        : piece,
    );
  return element('code', {}, pieces);
}

function partsBy(items, axesOfItem, size) {
  const groups = new Map();
  for (const item of items) {
    const key = axesOfItem(item).join('+');
    groups.set(key, (groups.get(key) || 0) + size(item));
  }
  return [...groups]
    .sort((a, b) => b[1] - a[1])
    .map(([key, amount]) => ({ key, parts: key ? key.split('+') : [], size: amount }));
}

// A line for each part: its axes, a bar, its amount.
function meters(parts, whole, print) {
  return element(
    'ul',
    { class: 'plain meters' },
    parts.map(part =>
      element(
        'li',
        {},
        element(
          'span',
          { class: 'what' },
          part.parts.length ? axisTags(part.parts) : element('span', { class: 'axis none tag' }, 'whole'),
        ),
        bar(
          [{ size: part.size, class: part.parts.length ? axisClass(part.parts[0]) : 'axis none' }],
          whole,
          `${part.key || 'whole'}: ${print(part.size)}`,
        ),
        element('span', { class: 'amount' }, print(part.size)),
      ),
    ),
  );
}

function sentCard() {
  const found = PHASES.map(phase => ({ phase, groups: byAxes(sentByRank.filter(each => each.phase === phase)) }));
  const most = Math.max(1, ...found.flatMap(({ groups }) => groups.map(group => group.total)));
  const lines = found.map(({ phase, groups }) => [
    element('li', { class: 'hint' }, phase),
    groups.map(group =>
      element(
        'li',
        {},
        element('span', { class: 'what' }, axisTags(group.axes)),
        bar(
          [{ size: group.total, class: axisClass(group.axes[0]) }],
          most,
          `${phase} over ${group.key}: ${bytes(group.total)}`,
        ),
        element(
          'span',
          {
            class: 'amount',
            title: Object.entries(group.kinds)
              .map(([kind, count]) => `${count} ${kind}`)
              .join(', '),
          },
          bytes(group.total),
          element('small', {}, ` ${group.count}×`),
        ),
      ),
    ),
  ]);
  return card(
    'What a rank sends',
    element(
      'p',
      { class: 'figure' },
      element('b', {}, bytes(sentBytes)),
      ` in ${counted(sentCount, 'collective')}`,
      report.timeline ? `, by the ranks of ${Object.keys(axes)[0]} ${busiest}` : '',
    ),
    lines.length
      ? element('ul', { class: 'plain meters' }, lines)
      : element('p', { class: 'hint' }, 'Nothing: no rank needs what another has.'),
  );
}

function heldCard() {
  const { peak, ...classes } = data.memory;
  const most = Math.max(1, peak, ...Object.values(classes));
  const line = (name, size, extra) =>
    element(
      'li',
      { class: extra },
      element('span', { class: 'what' }, CLASSES[name] || name),
      bar([{ size, class: `memory ${name}` }], most, `${name}: ${bytes(size)}`),
      element('span', { class: 'amount' }, bytes(size)),
    );
  return card(
    'What a rank holds',
    element('p', { class: 'figure' }, element('b', {}, bytes(peak)), ` at the peak, with the optimizer (${report.optimizer})`),
    element(
      'ul',
      { class: 'plain meters wide' },
      Object.entries(classes)
        .filter(([, size]) => size)
        .map(([name, size]) => line(name, size)),
    ),
  );
}
