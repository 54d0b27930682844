//! Runs credential programs: the request is written to stdin, the answer read from stdout.

use std::{
    collections::HashMap,
    io,
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::Command,
    sync::{Semaphore, oneshot},
    task::JoinSet,
};

use crate::image::trace::{self, Call, Peer};

/// The kubelet's timeout.
const TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum concurrent runs of one program, which may be an interpreter with a cloud SDK.
pub(super) const MAX_CONCURRENT_RUNS: usize = 4;
const MAX_ANSWER: u64 = 1024 * 1024;

/// Why a program gave no answer. Its output is not included, because it may contain secrets.
#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    #[error("it cannot be run")]
    Run(#[from] io::Error),
    #[error("it ended with {0}; run it by hand to see why")]
    Failed(ExitStatus, Vec<u8>),
    #[error("its answer is malformed")]
    Malformed,
    #[error("it did not end within {} s", TIMEOUT.as_secs())]
    TimedOut,
    #[error("its answer is larger than 1 MiB")]
    TooLarge,
}

/// How long a pod waits for a program that runs. A slower program runs on, and the next attempt uses its answer.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Programs that run although no pod waits for them any more. Dropping this ends them.
#[derive(Default)]
pub(super) struct Programs {
    tasks: Mutex<JoinSet<()>>,
    running: Arc<RunningPrograms>,
}

/// When each program began to run, by what it was asked for. Its entries are bounded by the slots of the programs.
#[derive(Default)]
pub(super) struct RunningPrograms(Mutex<HashMap<String, Instant>>);

/// Removes the entry of a program when it ends.
struct Running<'a> {
    programs: &'a RunningPrograms,
    key: &'a str,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.programs.0.lock().remove(self.key);
    }
}

impl RunningPrograms {
    fn start<'a>(&'a self, key: &'a str) -> Running<'a> {
        self.0.lock().insert(key.to_owned(), Instant::now());
        Running {
            programs: self,
            key,
        }
    }
}

impl Programs {
    /// The programs that run at the moment.
    pub(super) fn running(&self) -> Arc<RunningPrograms> {
        self.running.clone()
    }

    /// Spawns `work`, which runs a program under `key`, and waits for its result until the program has run for
    /// [`ANSWER_TIMEOUT`]; `None` when it takes longer. Time in the line does not count; the caller bounds that.
    pub(super) async fn wait_for<T: Send + 'static>(
        &self,
        key: &str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (sender, mut answer) = oneshot::channel();
        {
            let mut tasks = self.tasks.lock();
            while tasks.try_join_next().is_some() {}
            tasks.spawn(async move {
                // The pod may be gone.
                let _ = sender.send(work.await);
            });
        }
        loop {
            let began = self.running.0.lock().get(key).copied();
            let until = began.unwrap_or_else(Instant::now) + ANSWER_TIMEOUT;
            match tokio::time::timeout_at(until.into(), &mut answer).await {
                Ok(answer) => return answer.ok(),
                Err(_) if began.is_some() => {
                    tracing::warn!(
                        program = key,
                        "the credential program did not answer in 5 s; the next attempt uses its answer"
                    );
                    return None;
                }
                Err(_) => {}
            }
        }
    }
}

/// What a program is run for.
pub(super) struct Question<'a> {
    /// Under which [`Programs::wait_for`] waits.
    pub(super) key: &'a str,
    /// The image or registry that the credential is for.
    pub(super) subject: &'a str,
    /// Written to stdin.
    pub(super) text: &'a [u8],
}

/// Runs a program to its end. It is killed after [`TIMEOUT`] or when the future is dropped.
pub(super) async fn run(
    program: Command,
    question: Question<'_>,
    slots: &Semaphore,
    running: &RunningPrograms,
) -> Result<Vec<u8>, CommandError> {
    let _slot = slots.acquire().await;
    let _running = running.start(question.key);
    let name = program.as_std().get_program().to_owned();
    let began = Instant::now();
    let answer = tokio::time::timeout(TIMEOUT, answer(program, question.text)).await;
    let answer = answer.unwrap_or(Err(CommandError::TimedOut));
    let call = Call {
        peer: Peer::Program,
        method: "run",
        host: &name.to_string_lossy(),
        path: &format!(" {}", question.subject),
        attempt: 1,
        credential: trace::NO_CREDENTIAL,
    };
    match &answer {
        Ok(_) => call.ended(began, "answered"),
        Err(error) => call.ended(began, error),
    }
    answer
}

async fn answer(mut program: Command, question: &[u8]) -> Result<Vec<u8>, CommandError> {
    let mut child = program
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that does not read its input may still answer.
        let _ = stdin.write_all(question).await;
    }
    let mut answer = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(MAX_ANSWER + 1).read_to_end(&mut answer).await?;
    }
    if answer.len() as u64 > MAX_ANSWER {
        return Err(CommandError::TooLarge);
    }
    let status = child.wait().await?;
    if status.success() {
        Ok(answer)
    } else {
        Err(CommandError::Failed(status, answer))
    }
}
