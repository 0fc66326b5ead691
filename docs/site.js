// What the theme leaves out for people who do not see the page or use no mouse: names of the search's dialogue and of
// each code block's buttons, and the keyboard for tables that are wider than the page. The theme makes some of these
// after the page is loaded.
function named() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((buttons, index) => {
    buttons.setAttribute("aria-label", `Code block ${index + 1}`);
  });
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
}
named();
new MutationObserver(named).observe(document.body, {childList: true, subtree: true});
