//! A running `archaware run`.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use super::{DEADLINE, TestCluster, eventually};

/// Killed on drop.
pub struct Controller {
    child: Child,
    log: PathBuf,
    _dir: tempfile::TempDir,
}

impl Controller {
    /// Starts with the shipped permissions and this configuration, without its `apiVersion` and
    /// `kind`.
    pub fn start(cluster: &TestCluster, config: &str) -> Self {
        Self::start_as(&cluster.service_account("archaware"), config)
    }

    /// Starts with a lower log level than other tests.
    pub fn start_quiet(cluster: &TestCluster, config: &str) -> Self {
        Self::launch(
            &cluster.service_account("archaware"),
            config,
            "warn,archaware::cli=info",
        )
    }

    /// Starts with another kubeconfig.
    pub fn start_as(kubeconfig: &Path, config: &str) -> Self {
        Self::launch(kubeconfig, config, "debug")
    }

    /// Starts with log level trace for all libraries.
    pub fn start_loud(cluster: &TestCluster, config: &str) -> Self {
        let account = cluster.service_account("archaware");
        Self::launch(&account, config, "archaware=trace,trace")
    }

    /// Starts with another namespace of its own.
    pub fn start_elsewhere(kubeconfig: &Path, namespace: &str) -> Self {
        let environment = [("ARCHAWARE_NAMESPACE", namespace)];
        Self::launch_with(kubeconfig, "", "debug", &environment)
    }

    /// Starts with additional environment variables.
    pub fn start_with(cluster: &TestCluster, config: &str, environment: &[(&str, &str)]) -> Self {
        Self::launch_with(
            &cluster.service_account("archaware"),
            config,
            "debug",
            environment,
        )
    }

    /// Starts with another `/etc/resolv.conf`, in a mount namespace.
    pub fn start_with_resolv_conf(cluster: &TestCluster, config: &str, resolv_conf: &Path) -> Self {
        const SCRIPT: &str = "mount --bind \"$1\" /etc/resolv.conf && shift && exec \"$@\"";
        // The program replaces both, so it has the process id that is started here.
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", SCRIPT, "sh"])
            .arg(resolv_conf)
            .arg(crate::program());
        let account = cluster.service_account("archaware");
        Self::run(command, &account, config, "info", &[])
    }

    /// The address of `--listen`.
    pub async fn address(&self) -> String {
        eventually("an address in the log", DEADLINE, || async {
            let log = self.log();
            let line = log
                .lines()
                .find(|line| line.contains("archaware started"))?;
            let line: serde_json::Value = serde_json::from_str(line).ok()?;
            Some(line["address"].as_str()?.to_owned())
        })
        .await
    }

    fn launch(kubeconfig: &Path, config: &str, log_level: &str) -> Self {
        Self::launch_with(kubeconfig, config, log_level, &[])
    }

    fn launch_with(
        kubeconfig: &Path,
        config: &str,
        log_level: &str,
        environment: &[(&str, &str)],
    ) -> Self {
        let command = Command::new(crate::program());
        Self::run(command, kubeconfig, config, log_level, environment)
    }

    fn run(
        mut command: Command,
        kubeconfig: &Path,
        config: &str,
        log_level: &str,
        environment: &[(&str, &str)],
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (file, log) = (dir.path().join("config.yaml"), dir.path().join("log"));
        let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
        std::fs::write(&file, format!("{head}{config}")).unwrap();
        let child = command
            .args([
                "run",
                "--listen",
                "127.0.0.1:0",
                "--log-level",
                log_level,
                "--config",
            ])
            .arg(&file)
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        Self {
            child,
            log,
            _dir: dir,
        }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Peak memory in MiB.
    pub fn peak_memory(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("VmHWM"))
            .unwrap();
        let kilobytes: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        kilobytes / 1024.0
    }

    /// CPU time since its start.
    pub fn cpu_time(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // The name of the program may contain spaces and ends with a parenthesis.
        let (_, fields) = stat.rsplit_once(')').unwrap();
        // utime and stime, in hundredths of a second (proc(5)).
        let times = fields.split_whitespace().skip(11).take(2);
        let ticks: u64 = times.map(|ticks| ticks.parse::<u64>().unwrap()).sum();
        Duration::from_millis(10 * ticks)
    }

    /// Waits until `archaware_leader` has this value.
    pub async fn wait_until_leading(&self, leads: bool) {
        let what = format!("archaware_leader to say {leads}");
        eventually(&what, DEADLINE, || async {
            ((self.metric("archaware_leader ").await > 0.0) == leads).then_some(())
        })
        .await;
    }

    /// The whole log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// Waits until the log contains `part`.
    pub async fn wait_for_log(&self, part: &str) {
        eventually(&format!("{part:?} in the log"), DEADLINE, || async {
            self.log().contains(part).then_some(())
        })
        .await;
    }

    pub fn signal(&self, signal: &str) {
        let status = Command::new("kill")
            .args([signal, &self.child.id().to_string()])
            .status();
        assert!(status.unwrap().success());
    }

    /// Sends SIGTERM; returns the exit status.
    pub async fn stop(mut self) -> i32 {
        self.signal("-TERM");
        self.exited().await
    }

    /// Waits until it exits; returns the exit status.
    pub async fn exited(&mut self) -> i32 {
        let mut status = None;
        let deadline = Duration::from_secs(20);
        let end = std::time::Instant::now() + deadline;
        while status.is_none() {
            assert!(
                std::time::Instant::now() < end,
                "archaware did not end; its log:\n{}",
                self.log()
            );
            status = self.child.try_wait().unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        status.and_then(|status| status.code()).unwrap_or(-1)
    }

    /// GETs an HTTP path; returns status and body.
    pub async fn http(&self, path: &str) -> (u16, String) {
        self.ask(path, reqwest::Client::get).await
    }

    /// PUTs to an HTTP path; returns status and body.
    pub async fn put(&self, path: &str, body: &str) -> (u16, String) {
        let body = body.to_owned();
        self.ask(path, |http, url| http.put(url).body(body)).await
    }

    async fn ask(
        &self,
        path: &str,
        request: impl FnOnce(&reqwest::Client, String) -> reqwest::RequestBuilder,
    ) -> (u16, String) {
        let address = self.address().await;
        let http = reqwest::Client::builder()
            .tls_certs_only([])
            .build()
            .unwrap();
        let request = request(&http, format!("http://{address}{path}"));
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    /// Number of patches sent, whatever their outcome.
    pub async fn patches(&self) -> u64 {
        let (_, body) = self.http("/metrics").await;
        let lines = body
            .lines()
            .filter(|line| line.starts_with("archaware_writes_total"));
        lines
            .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .sum()
    }

    /// Waits until a line of the metrics says this.
    pub async fn wait_for_metric(&self, line: &str) {
        eventually(line, DEADLINE, || async {
            let (_, body) = self.http("/metrics").await;
            body.lines().any(|one| one == line).then_some(())
        })
        .await;
    }

    /// The value of a metric by its name with labels; 0 when absent.
    pub async fn metric(&self, name: &str) -> f64 {
        let (_, body) = self.http("/metrics").await;
        let value = body
            .lines()
            .find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or_default()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of archaware ---\n{}", self.log());
        }
    }
}
