"""The report's HTML page, into which `report` puts a run; it loads nothing from anywhere."""

from __future__ import annotations

from string import Template

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --paper: #fff; --wash: #f5f6f8; --ink: #1c1d21; --muted: #666872; --rule: #e2e3e8;
  --accent: #2457c5; --warn: #c2460e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #131417; --wash: #1c1e22; --ink: #e9eaee; --muted: #9a9da8; --rule: #30333a;
    --accent: #84a9ff; --warn: #ff9a62; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 56px 32px 72px; }
.run { margin: 0; color: var(--muted); font-size: 14px; }
h1 { margin: 6px 0 8px; font-size: 38px; line-height: 1.15; letter-spacing: -0.02em; text-wrap: balance; }
.standing { margin: 0; max-width: 52em; color: var(--muted); }
h2 { margin: 56px 0 16px; font-size: 18px; letter-spacing: -0.005em; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(108px, 1fr)); gap: 20px 20px; margin: 36px 0 44px;
  padding: 20px 0; border: solid var(--rule); border-width: 1px 0; }
dt { color: var(--muted); font-size: 13px; }
dd { margin: 0; font-size: 18px; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 0; }
.drawings { display: grid; grid-template-columns: repeat(6, 1fr); gap: 32px 28px; }
.drawings figure { grid-column: span 2; }
.drawings .held_out { grid-column: span 4; }
.drawings [class^="against"], .drawings .curves { grid-column: span 3; }
.drawings svg { display: block; width: 100%; height: auto; overflow: visible; }
.drawings text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 20px; }
figcaption { margin-bottom: 6px; color: var(--muted); font-size: 13px; }
pre { margin: 0; padding: 14px 16px; border-radius: 6px; background: var(--wash); overflow: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace;
  tab-size: 4; }
.samples pre { min-height: 100%; max-height: 30em; }
.samples figure { display: grid; grid-template-rows: auto 1fr; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 28px 5px 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--muted); font-weight: 400; white-space: nowrap; }
details { margin-top: 28px; }
summary { margin-bottom: 10px; color: var(--muted); font-size: 14px; cursor: pointer; }
@media (max-width: 820px) {
  main { padding: 32px 18px 48px; }
  h1 { font-size: 29px; }
  .drawings figure, .drawings .held_out { grid-column: span 6; }
}
</style>
</head>
<body>
<main>
<p class="run">$title</p>
<h1>$headline</h1>
<p class="standing">$standing</p>
<dl>
$figures
</dl>
<div class="drawings">
$drawings
</div>
$samples
<section><h2>The run</h2>
$table
$config
</section>
</main>
</body>
</html>
""")
