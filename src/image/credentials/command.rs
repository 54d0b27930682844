//! Runs credential programs: the request is written to stdin, the answer read from stdout.

use std::{
    io,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::Command,
    sync::{Semaphore, oneshot},
    task::JoinSet,
};

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

/// How long a pod waits for a program. A slower program runs on, and the next attempt uses its answer.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Programs that run although no pod waits for them any more. Dropping this ends them.
#[derive(Default)]
pub(super) struct Programs(Mutex<JoinSet<()>>);

impl Programs {
    /// Runs `work`, the program of this name, and waits [`ANSWER_TIMEOUT`] for it; `None` when it takes longer.
    pub(super) async fn wait_for<T: Send + 'static>(
        &self,
        program: &str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (sender, answer) = oneshot::channel();
        {
            let mut running = self.0.lock();
            while running.try_join_next().is_some() {}
            running.spawn(async move {
                // The pod may be gone.
                let _ = sender.send(work.await);
            });
        }
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, answer).await;
        if answer.is_err() {
            tracing::warn!(
                program,
                "the credential program did not answer in 5 s; the next attempt uses its answer"
            );
        }
        answer.ok()?.ok()
    }
}

/// Runs a program to its end. It is killed after [`TIMEOUT`] or when the future is dropped.
pub(super) async fn run(
    mut program: Command,
    question: &[u8],
    slots: &Semaphore,
) -> Result<Vec<u8>, CommandError> {
    let running = async {
        let _slot = slots.acquire().await;
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
    };
    tokio::time::timeout(TIMEOUT, running)
        .await
        .unwrap_or(Err(CommandError::TimedOut))
}
