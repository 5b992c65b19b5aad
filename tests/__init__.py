"""The tests of megagrid. The folders mirror the package; `equivalence/` compares whole grids."""
