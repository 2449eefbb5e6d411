"""Airflow: `laserbatch nightly` for each day that is over. The date is that of the DAG run, so that Airflow's backfills
run earlier nights; retries continue with the finished work."""

from datetime import datetime, timedelta

try:  # Airflow 3, and Airflow 2 with its providers
    from airflow.providers.standard.operators.bash import BashOperator
    from airflow.sdk import DAG
except ImportError:
    from airflow import DAG
    from airflow.operators.bash import BashOperator
from airflow.timetables.interval import CronDataIntervalTimetable

CONFIG = "/etc/laserbatch/laserbatch.yaml"
# A retry after exit codes 2, 3 and 4, which repeat, ends in seconds and changes nothing.
NIGHT = f"exec laserbatch nightly --config {CONFIG} --date {{{{ ds }}}}"

with DAG(
    dag_id="laserbatch",
    description="The night's knowledge about users and items",
    # With the string "0 2 * * *", {{ ds }} would be the current day in Airflow 3, and the day before in Airflow 2.
    schedule=CronDataIntervalTimetable("0 2 * * *", timezone="UTC"),
    start_date=datetime(2025, 1, 1),
    catchup=False,
    max_active_runs=1,  # one night at a time: each is built on the one before it
    dagrun_timeout=timedelta(hours=22),
    default_args={
        "retries": 2,
        "retry_delay": timedelta(minutes=5),
        "execution_timeout": timedelta(hours=20),
        "email_on_failure": True,
        "email": ["recommendations@example.com"],
    },
    tags=["laserbatch"],
) as dag:
    doctor = BashOperator(task_id="doctor", bash_command=f"laserbatch doctor --config {CONFIG} --no-ray", retries=0)
    night = BashOperator(task_id="night", bash_command=NIGHT, append_env=True)
    doctor >> night
