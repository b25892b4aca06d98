"""The allocation paper's own environment (Dadizadeh Dargiry 2026), as printed."""
