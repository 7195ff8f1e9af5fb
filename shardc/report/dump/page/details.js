// What the inspector shows of each kind of thing.

const MOST_PARTS = 2; // of a bucket that are shown at once

function showCollective(id) {
  const each = collectives.get(id);
  if (!each) return null;
  const found = because.get(id),
    size = each.axes.reduce((product, part) => product * rankCount(part), 1);
  const parts = found.parts.map(partOf),
    rest = parts.splice(MOST_PARTS);
  return [
    heading(each.kind, each.id),
    element('p', {}, axisTags(each.axes), ` ${each.phase}, groups of ${counted(size, 'rank')}`),
    element(
      'p',
      { class: 'figure' },
      element('b', {}, bytes(each.wire_bytes)),
      ` sent by a rank${each.count > 1 ? `, ${each.count} times` : ''}, in about ${seconds(found.seconds)}`,
    ),
    element('h3', {}, 'Why'),
    parts,
    rest.length ? folded(`and ${rest.length} more that go with them`, rest) : '',
    found.notes.map(note => element('p', { class: 'hint' }, note)),
    found.choices.length ? [element('h3', {}, 'What it was chosen among'), choices(found.choices)] : '',
    element('h3', {}, 'What is sent'),
    facts([
      ['in', code(`${each.dtype}${shapeText(each.local_shape_in)}`)],
      ['out', code(`${each.dtype}${shapeText(each.local_shape_out)}`)],
      ['bytes', grouped(each.bytes)],
      ['wire bytes', grouped(each.wire_bytes)],
      ['stage', each.stage ?? ''],
      ['source', each.source],
      ['module', each.at && each.at.module ? link('module', each.at.module) : ''],
    ]),
    element('h3', {}, 'What would remove it'),
    found.needed ? element('p', {}, `It is there because ${found.needed}.`) : '',
    element(
      'p',
      { class: 'hint' },
      `A change that ${each.kind === 'send' ? 'lets less cross between stages' : 'removes it'}, and what that costs, `,
      'is found by compiling again:',
    ),
    copyable(report.asking.join(id)),
    each.at && values.has(each.at.name) ? inTree(each.at.module, each.at.name) : '',
  ];
}

// A text to be typed, with a button that copies it; it is marked too, for where a page may not copy.
function copyable(text) {
  const shown = element('code', {}, text);
  const button = element('button', { type: 'button', class: 'show', onclick: copy }, 'Copy');
  const done = () => button.replaceChildren('Copied');
  const byHand = () => document.execCommand('copy') && done();
  function copy() {
    getSelection().selectAllChildren(shown);
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, byHand);
    else byHand();
  }
  return element('div', { class: 'copyable' }, shown, button);
}

// The ranks along an axis, or along a part of one.
function rankCount(part) {
  return Number((/:\(\d+\)(\d+)/.exec(part) || [])[1]) || axes[part] || 1;
}

// A sentence with its values and types marked.
function rich(sentence) {
  return sentence
    .split(/((?:\b[a-z]+\d*)\[[^\]]*\](?:\{[^}]*\})*)/)
    .map((piece, i) =>
      i % 2
        ? typeText(piece)
        : piece
            .split(/([\w.]+)/)
            .map(word => (values.has(word) && !values.get(word).given ? link('value', word) : word)),
    );
}

function code(text) {
  return element('code', { class: 'type' }, text);
}

function edgeList(title, names) {
  if (!names.length) return '';
  const most = 24;
  return [
    element('h3', {}, title),
    element(
      'ul',
      { class: 'plain edge-list' },
      names.slice(0, most).map(name => element('li', {}, toValue(name), ' ', typeText(values.get(name).type))),
      names.length > most ? element('li', { class: 'hint' }, `and ${names.length - most} more`) : '',
    ),
  ];
}

function showValue(name) {
  const value = values.get(name);
  if (!value) return null;
  const placed = report.pins.filter(
    pin => pin.name === called(value) && pin.kind === (value.given ? value.given.kind : 'value'),
  );
  return [
    heading(value.given ? value.given.kind : value.op, called(value)),
    element('p', {}, typeText(value.type)),
    calls.has(name) ? element('pre', {}, calls.get(name)) : '',
    value.sends.map(each => element('p', {}, link('collective', each.id, sentMarks([each])))),
    facts([
      ['phase', value.phase],
      ['module', value.module ? link('module', value.module) : ''],
      ['source', value.source],
      ['annotated', placed.map(pin => link('annotation', pin.text, annotationText(pin.text)))[0]],
      ['stage', (value.runs || []).map(run => `${run.stage} ${(run.part || '').replace('_', ' ')}`).join(', ')],
    ]),
    ...reasons([name]),
    edgeList('Takes', value.operands),
    edgeList('Goes to', value.users),
    value.home ? inTree(value.module, name) : '',
  ];
}

function showParameter(name) {
  const entry = stored.get(name);
  if (!entry) return null;
  const value = values.get(entry.node),
    owner = ownerOf(name);
  const placed = report.pins.find(pin => pin.name === name && pin.kind === entry.kind);
  const sums = [...collectives.values()].filter(each => `${each.cause}; `.includes(`the gradient ${name} wants`));
  return [
    heading(entry.kind, name),
    element('p', {}, typeText(typeOf(entry))),
    layouts.has(entry.node) ? largePicture(entry) : '',
    facts([
      ['on a rank', `${shapeText(entry.local_shape)}, ${bytes(entry.bytes)}`],
      ['whole', `${shapeText(entry.shape)}, ${bytes(entry.whole_bytes)}`],
      ['annotated', placed ? link('annotation', placed.text, annotationText(placed.text)) : ''],
      ['module', owner ? link('module', owner) : ''],
      ['stages', (entry.stages || []).join(', ')],
      ['gradient sent in', sums.length ? sums.map(each => link('collective', each.id)) : ''],
    ]),
    ...reasons([entry.node]),
    edgeList('Goes to', value.users),
  ];
}

function showModule(path) {
  const module = modules.get(path);
  if (!module) return null;
  const { taken, given } = edges(module),
    sent = ['forward', 'backward', 'update'].flatMap(phase => module.sent[phase]);
  return [
    heading('module', path || report.model),
    element(
      'p',
      {},
      `${counted(module.values, 'op')}${module.bytes ? `, ${bytes(module.bytes)} of parameters on a rank` : ''}`,
    ),
    edgeList('Forward takes', taken),
    edgeList('Forward gives', given),
    element('h3', {}, 'Sends'),
    sent.length
      ? element(
          'ul',
          { class: 'plain edge-list' },
          sent
            .slice(0, 60)
            .map(each => element('li', {}, link('collective', each.id, sentMarks([each])), ` ${each.phase}`)),
        )
      : element('p', { class: 'hint' }, 'Nothing.'),
    ...reasons(given.slice(-1)),
    inTree(path, ''),
  ];
}

function showAnnotation(text) {
  const pins = report.pins.filter(pin => pin.text === text),
    at = report.annotations.indexOf(text);
  if (!pins.length && at < 0) return null;
  const reached = [...chains]
    .filter(([, found]) => found.some(([, step]) => report.steps[step][0] === at))
    .map(([name]) => name);
  const named = pins.map(pin =>
    stored.has(pin.name) ? link('parameter', pin.name) : element('span', {}, `${pin.kind} ${pin.name}`),
  );
  return [
    heading('annotation', annotationText(text)),
    element('p', {}, `It reaches ${counted(reached.length, 'value')}.`),
    element('h3', {}, 'It is about'),
    element(
      'ul',
      { class: 'plain edge-list' },
      named.map(each => element('li', {}, each)),
    ),
    edgeList('It reaches', reached),
  ];
}
