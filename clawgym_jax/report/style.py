"""The page's style sheet: light and dark, one column on a phone, no scripts, nothing loaded.

Colours s0..s6 tell series apart and have a contrast of at least 3 to 1 on both backgrounds; dashes
and hatching say the same without colour. Not here: which element has which class.
"""

from __future__ import annotations

SERIES = 7

CSS = """
:root {
  color-scheme: light dark;
  --page: #fdfdfc; --ink: #1c1f24; --soft: #5b626d; --line: #d9dce1; --panel: #f3f4f6;
  --context: #a3aab6; --sampled: #2158d0; --dropped: #b4520a;
  --s0: #2158d0; --s1: #b4520a; --s2: #0f766e; --s3: #7c3aed; --s4: #be185d; --s5: #4d7c0f;
  --s6: #6b7280; --shade: 226, 88, 12;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171c; --ink: #e7e9ee; --soft: #a0a8b5; --line: #343a44; --panel: #1d2128;
    --context: #667080; --sampled: #7aa5ff; --dropped: #f3a25c;
    --s0: #7aa5ff; --s1: #f3a25c; --s2: #4fc9bd; --s3: #b69cff; --s4: #f28cb8; --s5: #a5cf5c;
    --s6: #98a1ae; --shade: 251, 146, 60;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: .5rem 0 0; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
h1, h2, h3, p, figcaption { overflow-wrap: anywhere; }
p { margin: .3rem 0 .7rem; max-width: 46rem; } .soft, figcaption small { color: var(--soft); }
.missing { border-left: 4px solid var(--dropped); padding-left: .8rem; }
.charts { display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; margin-bottom: .2rem; }
figcaption small { font-weight: 400; display: block; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.chart { max-width: 28rem; }
svg text { paint-order: stroke; stroke: var(--page); stroke-width: 3px;
  fill: var(--soft); font: 11px system-ui, sans-serif; }
svg text.ink { fill: var(--ink); }
.grid { stroke: var(--line); stroke-width: 1; } .limit { stroke: var(--dropped);
  stroke-dasharray: 2 3; stroke-width: 1.5; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.elbow { fill: none; stroke: var(--soft); stroke-width: 1.2; }
.context { fill: var(--context); } .sampled { fill: var(--sampled); }
.dropped { fill: url(#hatch); stroke: var(--dropped); stroke-width: 1.5; }
.hatch { stroke: var(--dropped); stroke-width: 2.5; }
.before { fill: var(--page); stroke: var(--s0); stroke-width: 2; } .after { fill: var(--s0); }
.range { stroke: var(--s0); stroke-width: 2; } .range.early { stroke-dasharray: 3 3; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; padding: 0;
  margin: .2rem 0; font-size: .85rem; }
.legend svg { display: inline-block; width: 1.8rem; height: .8rem; margin-right: .35rem;
  vertical-align: -.05rem; }
.scroll { overflow-x: auto; } .wide { min-width: 34rem; }
table { border-collapse: collapse; font-size: .88rem; margin: .4rem 0;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); } th { text-align: left; font-weight: 600; }
td, thead th { white-space: nowrap; } td, thead th + th { text-align: right; }
tbody th { overflow-wrap: anywhere; min-width: 6.5rem; max-width: 26rem; }
td, th { padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
summary { cursor: pointer; color: var(--soft); font-size: .88rem; }
.call { border: 1px solid var(--line); border-radius: .5rem; padding: .2rem .8rem .6rem;
  margin: .8rem 0; }
.call p { font-size: .88rem; }
pre { background: var(--panel); border-radius: .4rem; padding: .6rem; margin: .2rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 26rem; overflow-y: auto;
  font: .82rem/1.5 ui-monospace, monospace; }
.key span { white-space: nowrap; padding: 0 .3rem; }
.t1 { background: rgba(var(--shade), .13); } .t2 { background: rgba(var(--shade), .30); }
.t3 { background: rgba(var(--shade), .48); border-bottom: 2px dotted var(--ink); }
.t4 { background: rgba(var(--shade), .68); border-bottom: 2px solid var(--ink); }
""" + "".join(
    f".s{i} {{ stroke: var(--s{i}); }} .f{i} {{ fill: var(--s{i}); }}\n" for i in range(SERIES)
)
