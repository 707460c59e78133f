"""The router: places sessions on engines so that groups hold their shares, and proxies for agents that know only a URL.

Placement is pure (`placement`), what is known lives in one table (`table`), and HTTP is a thin shell around the two.
"""
