"""The look of the report: one style sheet, in colours that colour-blind readers tell apart (after Okabe and Ito)."""

STYLE = """
:root {
  --page: #f5f6f7; --card: #ffffff; --ink: #1d2126; --soft: #5b6470; --grid: #e1e4e8; --line: #d5d9de;
  --train: #0072b2; --held: #d55e00; --batch: #0072b2; --noise: #c98a00; --rate: #a03f86; --spent: #00805f;
  --good: #00805f; --warn: #a85400; --note: #fff6e5;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  color-scheme: light;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #131519; --card: #1c1f25; --ink: #e6e9ed; --soft: #9ca6b2; --grid: #2c3139; --line: #363c45;
    --train: #56b4e9; --held: #ff8b4a; --batch: #56b4e9; --noise: #f0b83a; --rate: #dd93c8; --spent: #3ccb9f;
    --good: #3ccb9f; --warn: #ffb066; --note: #2b2418;
    color-scheme: dark;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 var(--font); }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 56px; }
header { margin-bottom: 20px; }
h1 { font-size: 1.65rem; line-height: 1.2; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 36px 0 12px; }
h3 { font-size: .95rem; margin: 0; }
p { margin: 0 0 8px; }
.under { color: var(--soft); font-size: .9rem; margin: 0; overflow-wrap: anywhere; }
.pill { display: inline-block; border: 1px solid currentColor; border-radius: 99px; padding: 0 10px;
  font-size: .82rem; }
.pill.good { color: var(--good); } .pill.warn { color: var(--warn); }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 0; }
.numbers > div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.numbers dt { color: var(--soft); font-size: .82rem; }
.numbers dd { margin: 0; }
.numbers .value { font-size: 1.5rem; font-weight: 650; line-height: 1.25; }
.numbers .about { color: var(--soft); font-size: .82rem; line-height: 1.35; }
.words { margin: 18px 0 0; padding: 0; list-style: none; max-width: 78ch; }
.words li { padding: 3px 0 3px 16px; position: relative; }
.words li::before { content: ""; position: absolute; left: 0; top: .85em; width: 6px; height: 6px; border-radius: 50%;
  background: var(--train); }
.caveats { margin: 18px 0 0; background: var(--note); border-left: 4px solid var(--noise); border-radius: 4px;
  padding: 10px 16px; }
.caveats h3 { color: var(--warn); margin-bottom: 2px; }
.caveats ul { margin: 0; padding-left: 18px; max-width: 90ch; font-size: .92rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px; }
.alone { grid-template-columns: minmax(0, 620px); margin-top: 16px; }
.words + .scroll { margin-top: 14px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 12px 8px;
  min-width: 0; break-inside: avoid; }
figure > svg { display: block; width: 100%; height: auto; margin-top: 6px; }
figcaption { padding: 0 4px; }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; margin: 3px 0 0; padding: 0; list-style: none; font-size: .8rem;
  color: var(--soft); }
.legend svg { width: 22px; height: 10px; margin-right: 5px; vertical-align: baseline; }
.note { font-size: .82rem; color: var(--soft); margin: 4px 4px 2px; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 12px; border-top: 1px solid var(--grid); vertical-align: top; }
thead th { border-top: 0; color: var(--soft); font-weight: 600; font-size: .8rem; white-space: nowrap; }
td.nowrap { white-space: nowrap; }
.left, td.left { text-align: left; }
td.strong { font-weight: 650; white-space: nowrap; }
td.left { overflow-wrap: anywhere; min-width: 16ch; }
.settings th, .settings td { text-align: left; }
details { margin-top: 12px; }
summary { cursor: pointer; color: var(--soft); padding: 4px 0; }
details .scroll { margin-top: 6px; }
.quiet table { font-size: .82rem; color: var(--soft); }
pre { margin: 6px 0 0; padding: 12px 14px; overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; font: .82rem/1.5 var(--mono); }
pre.wrap { white-space: pre-wrap; overflow-wrap: anywhere; }
footer { margin-top: 36px; color: var(--soft); font-size: .82rem; }
@media (max-width: 640px) {
  main { padding: 18px 14px 40px; }
  h1 { font-size: 1.35rem; }
  .numbers { grid-template-columns: 1fr 1fr; gap: 8px; }
  .numbers > div { padding: 9px 11px; }
  .numbers .value { font-size: 1.22rem; }
  figure { padding: 10px 8px 6px; }
  .rows thead { position: absolute; clip-path: inset(50%); height: 1px; overflow: hidden; }
  .rows tr { display: block; padding: 8px 12px; border-top: 1px solid var(--grid); }
  .rows tbody tr:first-child { border-top: 0; }
  .rows td { display: flex; justify-content: space-between; gap: 16px; border: 0; padding: 1px 0; text-align: right;
    white-space: normal; overflow-wrap: anywhere; }
  .rows td::before { content: attr(data-label); color: var(--soft); font-weight: 400; white-space: nowrap; }
  .rows td.left { display: block; text-align: left; padding-top: 3px; }
  .rows td.left::before { display: none; }
}
@media print {
  @page { margin: 14mm; }
  body { background: none; font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  .plots { grid-template-columns: 1fr 1fr; gap: 8px; }
  .caveats { border: 1px solid var(--line); }
  h2 { break-after: avoid; } tr, .numbers > div { break-inside: avoid; }
  .scroll { overflow: visible; }
}
"""
