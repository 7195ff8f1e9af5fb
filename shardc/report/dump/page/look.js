// What to look at first: what is wrong, then what is large.

// A line for each thing that a reader should know of first; what is wrong stands before what is large.
function lookCard() {
  const lines = [...alarms(), ...biggest(), ...wholeOnes()];
  const fine = lines.some(line => line.isAlarm)
    ? []
    : [{ sign: '✓', text: 'Every op has a rule, and an annotation asks for every gather.', isFine: true }];
  const items = [...fine, ...lines].map(({ sign, text, isAlarm, isFine }) =>
    element(
      'li',
      { class: isAlarm ? 'alarm' : isFine ? 'fine' : '' },
      element('span', { class: 'sign', 'aria-hidden': 'true' }, sign),
      element('span', {}, text),
    ),
  );
  return element(
    'article',
    { class: 'card wide' },
    element('h3', {}, 'Look here first'),
    element('ul', { class: 'plain look' }, items),
  );
}

function alarms() {
  const cutting = new Set([...values.values()].flatMap(value => axesOf(value.type).map(baseAxis)));
  const idle = Object.entries(axes).filter(
    ([name, size], i) => size > 1 && !cutting.has(name) && !(report.timeline && i === 0),
  );
  const isIdle = note => idle.some(([name]) => note.startsWith(`axis ${name} cuts nothing`));
  const counts = [
    [
      data.fallbacks.length,
      'op without a rule, run whole on every rank',
      'ops without a rule, run whole on every rank',
    ],
    [
      report.offences.length - data.fallbacks.length,
      'gather that no annotation asks for',
      'gathers that no annotation asks for',
    ],
    [data.notes.filter(note => !isIdle(note)).length, 'note of the compiler', 'notes of the compiler'],
  ];
  return [
    ...idle.map(([name, size]) => ({
      sign: '!',
      isAlarm: true,
      text: ['Axis ', axisTag(name), ` cuts nothing: its ${size} ranks all do the same work.`],
    })),
    ...counts
      .filter(([count]) => count > 0)
      .map(([count, one, many]) => ({
        sign: '!',
        isAlarm: true,
        text: element('a', { href: '#notes' }, `${grouped(count)} ${count === 1 ? one : many}`),
      })),
  ];
}

// The collectives that send most, those that are alike together.
function biggest() {
  const groups = new Map();
  for (const each of sentByRank) {
    const key = [each.kind, each.axes, each.phase, each.total].join(' ');
    groups.set(key, [...(groups.get(key) || []), each]);
  }
  const found = [...groups.values()].map(group => ({ group, sum: total(group, each => each.total) }));
  return found
    .filter(({ sum }) => sum)
    .sort((a, b) => b.sum - a.sum)
    .slice(0, 3)
    .map(({ group, sum }) => ({
      sign: '↔',
      text: [
        group.length > 1 ? `${group.length} × ` : '',
        link('collective', group[0].id, `${group[0].kind} over ${group[0].axes.join('+')}`),
        ` in ${group[0].phase}: ${bytes(sum)}, ${share(sum, sentBytes)} of all that is sent, `,
        group.length > 1 ? 'first for ' : 'for ',
        forWhom(group[0]),
      ],
    }));
}

function wholeOnes() {
  return [...stored.values()]
    .filter(entry => entry.kind === 'parameter' && entry.bytes === entry.whole_bytes && ranks > 1)
    .filter(entry => entry.bytes * 20 > data.memory.parameters)
    .sort((a, b) => b.bytes - a.bytes)
    .slice(0, 2)
    .map(entry => ({
      sign: '▣',
      text: [
        link('parameter', entry.name),
        ` is whole on every rank${report.timeline ? ' of its stage' : ''}: ${bytes(entry.bytes)}, `,
        `${share(entry.bytes, data.memory.parameters)} of a rank\u2019s parameters.`,
      ],
    }));
}

// What a collective is for: the parameters whose gradients it sums, or the module that it is in.
function forWhom(each) {
  const gradients = [...each.cause.matchAll(/the gradient (\S+) wants/g)].map(found => found[1]);
  if (gradients.length) {
    return [
      'the gradient of ',
      link('parameter', gradients[0]),
      gradients.length > 1 ? ` and ${gradients.length - 1} more` : '',
    ];
  }
  const path = each.at ? each.at.module : '';
  return path ? link('module', path) : report.model;
}
