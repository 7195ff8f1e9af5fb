// A pipeline's stages, when each rank does what, and what it holds meanwhile.

const [ROW, CHART, MARGIN] = [34, 1080, 64];

function schedule() {
  const { timeline, ranks: held } = report,
    { schedule: found, stages } = data;
  const scale = (CHART - MARGIN - 8) / (timeline.makespan || 1);
  const made = svg('svg', {
    class: 'schedule',
    viewBox: `0 0 ${CHART} ${ROW * timeline.ranks.length + 26}`,
    role: 'img',
    'aria-label': `${found.name}: what each rank does when`,
  });
  timeline.ranks.forEach((boxes, rank) =>
    made.append(
      svg('text', { class: 'lane plainly', x: MARGIN - 10, y: rank * ROW + 21, 'text-anchor': 'end' }, `rank ${rank}`),
      ...boxes.map(box => scheduled(box, rank, scale)),
    ),
  );
  made.append(
    svg('text', { class: 'lane plainly', x: MARGIN, y: ROW * timeline.ranks.length + 18 }, '0'),
    svg(
      'text',
      { class: 'lane plainly', x: CHART - 8, y: ROW * timeline.ranks.length + 18, 'text-anchor': 'end' },
      `${seconds(timeline.makespan)}, estimated`,
    ),
  );
  const words = [
    `${counted(stages.length, 'stage')} in ${counted(timeline.ranks.length, 'rank')} along ${Object.keys(axes)[0]}, `,
    `${counted(found.microbatches, 'microbatch')} by ${found.name}. `,
    `Ranks are idle for ${(100 * timeline.idle).toFixed(1)} % of the step.`,
  ];
  const legend = element(
    'ul',
    { class: 'plain keys' },
    Object.entries({
      F: 'forward',
      B: 'backward',
      I: 'gradients of inputs',
      W: 'gradients of weights',
      REDUCE: 'reduction over ranks',
    })
      .filter(([kind]) => timeline.ranks.flat().some(box => box.kind === kind))
      .map(([kind, text]) => element('li', {}, element('i', { class: `swatch action ${kind}` }), text)),
    element('li', {}, element('i', { class: 'swatch framed' }), 'on the critical path'),
  );
  return section(
    'schedule',
    'Schedule',
    words,
    element('div', { class: 'scroll', tabindex: '0', 'aria-label': 'The schedule, a picture' }, made),
    legend,
    stageTable(stages),
    ...held.map(memoryOfRank),
  );
}

function scheduled(box, rank, scale) {
  const x = MARGIN + box.start * scale,
    width = Math.max(1, box.seconds * scale);
  const what = `stage ${box.stage}${box.microbatch < 0 ? '' : `, microbatch ${box.microbatch}`}`;
  const say = `${box.name}: ${what}, ${seconds(box.start)} to ${seconds(box.start + box.seconds)}`;
  return svg(
    'g',
    { class: `action ${box.kind} ${box.critical ? 'critical' : ''}` },
    svg('title', {}, say),
    svg('rect', { x, y: rank * ROW + 4, width: Math.max(1, width - 1), height: ROW - 8, rx: 3 }),
    width > 7 * box.name.length + 4
      ? svg('text', { x: x + width / 2, y: rank * ROW + 21, 'text-anchor': 'middle' }, box.name)
      : '',
  );
}

function seconds(time) {
  const [unit, scale] = time >= 1 ? ['s', 1] : time >= 1e-3 ? ['ms', 1e3] : ['µs', 1e6];
  return time ? `${Number((time * scale).toPrecision(3))} ${unit}` : '0';
}

function stageTable(stages) {
  const columns = [
    { key: 'stage', title: 'stage', class: 'number', value: each => each.stage },
    { key: 'rank', title: 'rank', class: 'number', value: each => each.rank },
    {
      key: 'modules',
      title: 'modules',
      value: each => [...new Set(each.modules.map(path => path || report.model))].join(' to '),
    },
    number('elements', 'parameters', each => each.elements),
    number('parameter_bytes', 'bytes on a rank', each => each.parameter_bytes),
    number('flops', 'FLOPs a step', each => each.flops),
    { key: 'sent', title: 'sends', value: each => each.sent.map(sentText).join('; ') },
  ];
  return table('stages', columns, stages);
}

function sentText({ to, after, times, values: sent }) {
  const when = after === 'after' ? 'the last microbatch' : after.replace('_', ' ');
  return `to ${to} after ${when}, ${times} × ${bytes(total(sent, value => value.bytes))}`;
}

// The bytes that a rank holds at most in each of its actions.
function memoryOfRank({ curve, memory }, rank) {
  const most = Math.max(...report.ranks.map(each => each.memory.peak), 1);
  return element(
    'div',
    { class: 'rank-memory' },
    element(
      'p',
      { class: 'hint' },
      `rank ${rank}: at most `,
      element('b', {}, bytes(memory.peak)),
      `, of that ${bytes(memory.parameters)} parameters; ${bytes(memory.saved)} saved between actions`,
    ),
    element(
      'ol',
      { class: 'plain columns', 'aria-label': `bytes in each action of rank ${rank}` },
      curve.map(([action, size]) =>
        element(
          'li',
          { title: `${action}: ${grouped(size)} bytes`, class: `action ${(/[A-Z]+/.exec(action) || [''])[0]}` },
          element('i', { vars: { height: `calc((100% - 17px) * ${(size / most).toFixed(4)})` } }),
          element('small', {}, action),
        ),
      ),
    ),
  );
}
