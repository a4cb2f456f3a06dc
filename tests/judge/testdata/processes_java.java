public class Main {
  public static void main(String[] args) throws Exception {
    for (int i = 0; i < 500; i++) {
      Thread t = new Thread(() -> { try { Thread.sleep(60000); } catch (InterruptedException e) { } });
      t.setDaemon(true);
      t.start();
    }
  }
}
