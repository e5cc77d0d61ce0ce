"""The page that `xorl report` makes of the folders of runs."""
