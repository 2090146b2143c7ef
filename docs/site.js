// What the theme's script leaves out for keyboards and screen readers.
const mend = () => {
  // each block of code gets a landmark for its buttons, all without a name
  for (const buttons of document.querySelectorAll("nav.md-code__nav:not([role])")) {
    buttons.setAttribute("role", "none");
  }
  // code and tables that are wider than the page are scrolled with the arrow keys, also where nothing hovers
  const wide = document.querySelectorAll(":is(pre > code, .md-typeset__scrollwrap):not([tabindex])");
  for (const element of wide) {
    if (element.scrollWidth > element.clientWidth) element.setAttribute("tabindex", "0");
  }
};
new MutationObserver(mend).observe(document.body, {
  attributeFilter: ["tabindex"],
  childList: true,
  subtree: true,
});
addEventListener("resize", mend);
mend();
