"""The style sheet of report.html, for light and dark screens."""

SHEET = """
:root{--bg:#fbfaf7;--fg:#23281f;--dim:#6b7065;--line:#dcdcd2;--card:#fff;
--c0:#2f7d4f;--c1:#c26a1b;--c2:#3b6fb5;--c3:#8a4fa3;--c4:#a63d40}
@media(prefers-color-scheme:dark){:root{--bg:#171a16;--fg:#e6e8e1;--dim:#9aa094;--line:#33382f;--card:#1f231d;
--c0:#6cc48f;--c1:#e8a15c;--c2:#82aee6;--c3:#c596da;--c4:#e58b8e}}
body{margin:0 auto;max-width:1080px;padding:24px 20px 60px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:36px 0 12px}h3{font-size:15px;margin:20px 0 8px}
header p{margin:2px 0 0;color:var(--dim)}small,.meta{color:var(--dim);font-size:13px}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(210px,1fr));gap:12px;margin-top:20px}
.cards div,figure,article{background:var(--card);border:1px solid var(--line);border-radius:8px}
.cards div{padding:12px 14px}.cards b{display:block;font-size:19px;font-variant-numeric:tabular-nums}
.cards span{color:var(--dim);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(440px,100%),1fr));gap:14px}
figure{margin:0;padding:12px 12px 6px}figcaption{font-weight:600}svg{display:block;width:100%;height:auto}
svg text{fill:var(--dim);font-size:11px}.grid{stroke:var(--line);stroke-width:1}
polyline{fill:none;stroke-width:2;stroke-linejoin:round}
polyline.s0{stroke:var(--c0)}polyline.s1{stroke:var(--c1)}polyline.s2{stroke:var(--c2)}
polyline.s3{stroke:var(--c3)}polyline.s4{stroke:var(--c4)}
circle.s0{fill:var(--c0)}circle.s1{fill:var(--c1)}circle.s2{fill:var(--c2)}circle.s3{fill:var(--c3)}
circle.s4{fill:var(--c4)}
.legend{font-size:13px}.legend span{margin-right:14px}.legend .s0{color:var(--c0)}.legend .s1{color:var(--c1)}
.legend .s2{color:var(--c2)}.legend .s3{color:var(--c3)}.legend .s4{color:var(--c4)}
article{padding:10px 14px;margin-bottom:10px}
pre{margin:6px 0 0;white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,monospace}
pre.out{border-left:3px solid var(--c0);padding-left:10px}
table{border-collapse:collapse;font-size:13px;margin-top:8px}
td{border-bottom:1px solid var(--line);padding:3px 14px 3px 0;overflow-wrap:anywhere}
summary{cursor:pointer;color:var(--dim)}
"""
