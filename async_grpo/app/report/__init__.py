"""Displays and documents of a run: the live view in the terminal, report.md, summary.json and the plots.

drawing.py      Matplotlib helpers for all plots of runs and sweeps
live_state.py   LiveState, a snapshot of a running job
live_view.py    LiveView, the panel or the log lines of a running job
plots.py        plots/*.png of a run
run_report.py   report.md of a run
summary.py      summary.json of a run
"""
