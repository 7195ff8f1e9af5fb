// The tables: sorted by a column's head; each row leads to the inspector.

function table(id, columns, rows) {
  const body = element(
    'tbody',
    {},
    rows.map(row => tableRow(columns, row)),
  );
  const heads = columns.map((column, i) =>
    element(
      'th',
      { scope: 'col', class: column.class, 'aria-sort': 'none' },
      column.sort === null
        ? column.title
        : element('button', { type: 'button', onclick: event => sort(event.currentTarget, i) }, column.title),
    ),
  );
  function sort(button, i) {
    const head = button.parentNode,
      isDown = head.getAttribute('aria-sort') === 'descending';
    heads.forEach(each => each.setAttribute('aria-sort', 'none'));
    head.setAttribute('aria-sort', isDown ? 'ascending' : 'descending');
    const key = columns[i].sort || columns[i].value,
      sign = isDown ? 1 : -1;
    const order = [...body.rows].sort((a, b) => sign * compare(key(a.entry), key(b.entry)));
    body.append(...order);
  }
  return element(
    'div',
    { class: 'scroll', tabindex: '0', 'aria-label': `${id}, a table` },
    element('table', { id: `${id}-table` }, element('thead', {}, element('tr', {}, heads)), body),
  );
}

function tableRow(columns, entry) {
  const made = element(
    'tr',
    {},
    columns.map(column =>
      element('td', { class: column.class, 'data-key': column.key }, [
        column.show ? column.show(entry) : String(column.value(entry)),
      ]),
    ),
  );
  made.entry = entry;
  return made;
}

function compare(a, b) {
  return typeof a === 'number' ? a - b : String(a).localeCompare(String(b), 'en', { numeric: true });
}

function number(key, title, value) {
  return { key, title, class: 'number', value, show: entry => grouped(value(entry)) };
}

function duration(key, title) {
  return { key, title, class: 'number', value: entry => entry[key], show: entry => seconds(entry[key]) };
}

function collectivesSection() {
  const columns = [
    { key: 'id', title: 'collective', value: each => each.id, show: each => link('collective', each.id) },
    {
      title: 'kind',
      value: each => each.kind,
      show: each => [keyed('kind', each.kind), ' ', keyed('axes', axisTags(each.axes))],
    },
    { key: 'phase', title: 'phase', value: each => each.phase },
    ...(report.timeline
      ? [number('stage', 'stage', each => each.stage), number('times', 'times', each => each.times)]
      : []),
    {
      title: 'in → out',
      value: each => each.bytes,
      show: each => [
        keyed('dtype', each.dtype),
        ' ',
        keyed('local_shape_in', shapeText(each.local_shape_in)),
        ' → ',
        keyed('local_shape_out', shapeText(each.local_shape_out)),
      ],
    },
    number('bytes', 'bytes', each => each.bytes),
    number('wire_bytes', 'wire bytes', each => each.wire_bytes),
    {
      title: 'of',
      class: 'long',
      value: each => each.node,
      show: each => [clipped('node', each.node), clipped('source', each.source)],
    },
    { title: 'cause', class: 'long cause', value: each => each.cause, show: each => clipped('cause', each.cause) },
  ];
  return section(
    'collectives',
    'Collectives',
    `${counted(collectives.size, 'collective')} in the program; bytes are those that one rank sends each time.`,
    collectives.size
      ? table('collectives', columns, [...collectives.values()])
      : element('p', { class: 'note' }, 'There are none.'),
  );
}

function keyed(key, ...children) {
  return element('span', { 'data-key': key }, ...children);
}

function clipped(key, text) {
  return element('span', { class: 'clip', title: text, 'data-key': key }, text);
}

function shapeText(shape) {
  return `[${shape.join(', ')}]`;
}

function parametersSection() {
  const entries = [...stored.values()];
  const columns = [
    { key: 'layout', title: 'layout', sort: null, value: () => '', show: entry => smallPicture(entry) },
    { key: 'name', title: 'name', value: entry => entry.name, show: entry => link('parameter', entry.name) },
    { key: 'shape', title: 'shape', value: entry => shapeText(entry.shape), sort: entry => entry.whole_bytes },
    { key: 'sharding', title: 'sharding', value: typeOf, show: entry => typeText(typeOf(entry)) },
    {
      key: 'local_shape',
      title: 'on a rank',
      value: entry => shapeText(entry.local_shape),
      sort: entry => entry.bytes,
    },
    number('bytes', 'bytes on a rank', entry => entry.bytes),
    number('whole_bytes', 'bytes whole', entry => entry.whole_bytes),
    ...(report.timeline
      ? [{ key: 'stages', title: 'stage', class: 'number', value: entry => (entry.stages || []).join(', ') }]
      : []),
  ];
  return section(
    'parameters',
    'Parameters',
    [
      counted(data.parameters.length, 'parameter'),
      data.buffers.length ? ` and ${counted(data.buffers.length, 'buffer')}` : '',
      `; a rank holds ${bytes(data.memory.parameters)} of them.`,
    ],
    entries.length ? table('parameters', columns, entries) : element('p', { class: 'note' }, 'There are none.'),
  );
}

function notesSection() {
  const isFine = !report.offences.length && !data.notes.length;
  const offences = report.offences.map(each =>
    element(
      'li',
      { class: 'alarm' },
      element('b', {}, rich(each.who)),
      ': ',
      rich(each.what),
      element('br'),
      rich(each.problem),
      element('br'),
      element('span', { class: 'remedy' }, each.remedy),
    ),
  );
  const notes = data.notes.map(note => element('li', {}, note));
  return section(
    'notes',
    'Fallbacks and warnings',
    isFine
      ? 'None: every op has a rule, an annotation asks for every gather, and the compiler has nothing to remark.'
      : '',
    element('ul', { class: 'plain notes' }, offences, notes),
  );
}
