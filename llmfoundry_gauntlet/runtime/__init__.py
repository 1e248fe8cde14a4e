"""An evaluation on the ranks of a job, whoever trains: nothing below this package knows Composer."""
